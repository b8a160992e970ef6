// The C API of executorch_mlx/buffers.h. It reads and writes the memory of the arrays directly. An array that is not
// contiguous, or whose memory is shared, is copied to memory of its own first.
#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/buffers.h>
#pragma GCC visibility pop

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "call/evaluation.h"
#include "guarded.h"
#include "memory/host_memory.h"
#include "call/shared.h"

using namespace executorch_mlx;

struct executorch_mlx_buffers {
  std::shared_ptr<SharedData> shared;
  std::shared_ptr<Session> session;
  std::vector<std::pair<std::string, std::shared_ptr<Buffer>>> buffers;
};

namespace {

constexpr int kPositionAxis = 2; // the axis of KV caches on which the positions lie

// The contiguous memory of a buffer, as bytes [outer, num_indices, inner]: `outer` is the product of the axes before
// kPositionAxis, `num_indices` the size of kPositionAxis, and `inner` the number of bytes of the axes after it.
struct Bytes {
  char* data;
  size_t outer;
  size_t num_indices;
  size_t inner;

  char* at(size_t i, int64_t index) const { return data + (i * num_indices + static_cast<size_t>(index)) * inner; }
};

// Returns the memory of a buffer. If anything but the buffer might refer to this memory, or if the array is not
// contiguous, the buffer gets new memory first. `description` is that of executorch_mlx_buffers_describe(), for
// messages.
Bytes bytes_of(Buffer& buffer, const char* description) {
  mx::array& array = *buffer.contents;
  check_argument(array.ndim() > kPositionAxis, description, ": got rank ", array.ndim(), ", expected at least ",
      kPositionAxis + 1);
  array.eval();
  if (buffer.written) { // the contents may be available before the kernels have run: see State::take_over_memory()
    buffer.written->wait();
    buffer.written.reset();
  }
  if (!array.flags().row_contiguous || !array.is_donatable()) {
    mx::array source = mx::contiguous(array);
    source.eval();
    mx::array copy = allocate(array.shape(), array.dtype());
    std::memcpy(copy.data<char>(), source.data<char>(), copy.nbytes());
    array = std::move(copy);
  }
  size_t outer = 1;
  for (int axis = 0; axis < kPositionAxis; ++axis) {
    outer *= array.shape(axis);
  }
  const size_t num_indices = array.shape(kPositionAxis);
  return {array.data<char>(), outer, num_indices, array.size() == 0 ? 0 : array.nbytes() / (outer * num_indices)};
}

// Calls body(bytes) with the memory of a buffer while no method runs.
template <typename Body>
int with_bytes(executorch_mlx_buffers* buffers, size_t i, Body&& body) {
  return static_cast<int>(guarded("buffers", [&] {
    check_argument(buffers != nullptr, "got a null pointer");
    check_argument(i < buffers->buffers.size(), "got buffer ", i, ", expected less than ", buffers->buffers.size());
    Session& session = *buffers->session;
    std::lock_guard lock(session.mutex);
    try {
      for (const auto& [device, used] : session.streams) {
        Evaluation({}, used.stream, session.owner).wait();
      }
    } catch (...) {
      session.owner->has_lost_work = true;
    }
    session.check_defined();
    const auto& [description, buffer] = buffers->buffers[i];
    body(bytes_of(*buffer, description.c_str()));
  }));
}

void check_range(const Bytes& bytes, int64_t begin, int64_t count) {
  const auto num_indices = static_cast<int64_t>(bytes.num_indices);
  check_argument(0 <= begin && 0 <= count && begin <= num_indices && count <= num_indices - begin, "got ", count,
      " indices from ", begin, ", expected a range in [0, ", num_indices, ")");
}

} // namespace

int executorch_mlx_buffers_open(const void* named_data_map, executorch_mlx_buffers** buffers) {
  bool has_caches = false;
  const auto error = guarded("buffers", [&] {
    check_argument(named_data_map != nullptr && buffers != nullptr, "got a null pointer");
    auto result = std::make_unique<executorch_mlx_buffers>();
    const auto shared = SharedData::of(static_cast<const executorch::runtime::NamedDataMap*>(named_data_map));
    std::lock_guard lock(shared->loading);
    result->shared = shared;
    result->session = shared->first_session();
    check_argument(result->session != nullptr, "no method of the program is loaded");
    has_caches = !result->session->caches.expired();
    result->buffers = result->session->buffers.all();
    *buffers = has_caches ? nullptr : result.release();
  });
  return static_cast<int>(has_caches ? Error::NotSupported : error);
}

int executorch_mlx_has_ring_buffers(const void* named_data_map) {
  bool result = false;
  guarded("buffers", [&] {
    check_argument(named_data_map != nullptr, "got a null pointer");
    const auto shared = SharedData::of(static_cast<const executorch::runtime::NamedDataMap*>(named_data_map));
    std::lock_guard lock(shared->loading);
    const auto session = shared->first_session();
    const auto caches = session ? session->caches.lock() : nullptr;
    result =
        caches && std::any_of(caches->windows.begin(), caches->windows.end(), [](int window) { return window > 0; });
  });
  return result;
}

int executorch_mlx_buffers_reset(executorch_mlx_buffers* buffers) {
  return static_cast<int>(guarded("buffers", [&] {
    check_argument(buffers != nullptr, "got a null pointer");
    std::lock_guard loading(buffers->shared->loading);
    std::lock_guard lock(buffers->session->mutex);
    buffers->session->reset();
  }));
}

void executorch_mlx_buffers_close(executorch_mlx_buffers* buffers) { delete buffers; }

size_t executorch_mlx_buffers_count(const executorch_mlx_buffers* buffers) {
  return buffers == nullptr ? 0 : buffers->buffers.size();
}

const char* executorch_mlx_buffers_describe(const executorch_mlx_buffers* buffers, size_t buffer) {
  return buffer < executorch_mlx_buffers_count(buffers) ? buffers->buffers[buffer].first.c_str() : "";
}

void executorch_mlx_buffers_size(
    const executorch_mlx_buffers* buffers, size_t buffer, int64_t* length, size_t* index_bytes) {
  int64_t size = 0;
  size_t bytes = 0;
  if (buffer < executorch_mlx_buffers_count(buffers)) {
    std::lock_guard lock(buffers->session->mutex);
    const auto& contents = buffers->buffers[buffer].second->contents;
    if (contents && contents->ndim() > kPositionAxis && contents->shape(kPositionAxis) > 0) {
      size = contents->shape(kPositionAxis);
      bytes = contents->nbytes() / contents->shape(kPositionAxis);
    }
  }
  if (length != nullptr) {
    *length = size;
  }
  if (index_bytes != nullptr) {
    *index_bytes = bytes;
  }
}

int executorch_mlx_buffers_copy(
    executorch_mlx_buffers* buffers, size_t buffer, int64_t from, int64_t to, int64_t count) {
  return with_bytes(buffers, buffer, [&](const Bytes& bytes) {
    check_range(bytes, from, count);
    check_range(bytes, to, count);
    for (size_t i = 0; i < bytes.outer; ++i) {
      std::memmove(bytes.at(i, to), bytes.at(i, from), count * bytes.inner);
    }
  });
}

int executorch_mlx_buffers_read(
    executorch_mlx_buffers* buffers, size_t buffer, int64_t begin, int64_t count, void* data) {
  return with_bytes(buffers, buffer, [&](const Bytes& bytes) {
    check_range(bytes, begin, count);
    check_argument(data != nullptr || count == 0, "got a null pointer");
    for (size_t i = 0; i < bytes.outer; ++i) {
      std::memcpy(static_cast<char*>(data) + i * count * bytes.inner, bytes.at(i, begin), count * bytes.inner);
    }
  });
}

int executorch_mlx_buffers_write(
    executorch_mlx_buffers* buffers, size_t buffer, int64_t begin, int64_t count, const void* data) {
  return with_bytes(buffers, buffer, [&](const Bytes& bytes) {
    check_range(bytes, begin, count);
    check_argument(data != nullptr || count == 0, "got a null pointer");
    for (size_t i = 0; i < bytes.outer; ++i) {
      std::memcpy(bytes.at(i, begin), static_cast<const char*>(data) + i * count * bytes.inner, count * bytes.inner);
    }
  });
}
