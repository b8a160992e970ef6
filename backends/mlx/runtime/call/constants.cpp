#include "call/constants.h"

#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <set>

#include "call/evaluation.h"
#include "checks.h"
#include "dtype.h"
#include "memory/host_memory.h"
#include "memory/limit.h"
#include "program/tensor_meta.h"

namespace executorch_mlx {

namespace {

using executorch::runtime::FreeableBuffer;

struct Progress {
  OnLoad callback;
  void* user_data;
};
thread_local Progress progress{};

// Returns the named data `name`, or nullopt if there is none. Throws Failure if the data cannot be read.
std::optional<FreeableBuffer> find_data(const NamedDataMap* data, const char* name) {
  if (data == nullptr || name == nullptr) {
    return std::nullopt;
  }
  const auto keys = data->get_num_keys();
  for (uint32_t i = 0; keys.ok() && i < *keys; ++i) {
    const auto key = data->get_key(i);
    if (key.ok() && std::strcmp(*key, name) == 0) {
      auto buffer = data->get_data(name);
      if (!buffer.ok()) {
        fail(buffer.error(), "named data \"", name, "\" cannot be read");
      }
      return std::move(*buffer);
    }
  }
  return std::nullopt;
}

// Returns the size in bytes of a tensor without dynamic dimensions, or 2^62 if it is larger.
size_t bytes_of(const fb::TensorMeta& meta) {
  constexpr __int128 kMax = __int128{1} << 62;
  __int128 bytes = mx::size_of(dtype_of(meta.scalar_type()));
  for (const int size : static_shape(meta)) {
    bytes = std::min(bytes * size, kMax);
  }
  return static_cast<size_t>(bytes);
}

// Returns the tensor whose bytes are in `buffer`; `name` is for messages. Copies the bytes, unless `in_place` is true
// and adopt() succeeds: then the array takes over the memory of `buffer`, which is empty afterwards.
mx::array read_tensor(FreeableBuffer& buffer, const fb::TensorMeta& meta, const char* name, bool in_place) {
  const auto order = memory_order(meta);
  check_program(
      is_row_major(order), "constant \"", name, "\": got dim_order ", dims(order), ", expected a row-major one");
  const auto shape = static_shape(meta);
  const auto dtype = dtype_of(meta.scalar_type());
  check_program(bytes_of(meta) == buffer.size(), "constant \"", name, "\": got ", buffer.size(), " bytes, expected ",
      describe(meta));
  if (in_place) {
    if (auto adopted = adopt(buffer, shape, dtype)) {
      return *adopted;
    }
  }
  auto array = allocate(shape, dtype);
  if (buffer.size() != 0) {
    std::memcpy(array.data<char>(), buffer.data(), buffer.size());
  }
  return array;
}

// Copies a large x to the memory of the NVIDIA GPU. Arrays that the host has written are in managed memory, which CUDA
// moves between the host and the GPU page by page. Results of kernels are in the GPU's own memory. Returns x itself if
// x is small, `stream` is not on an NVIDIA GPU, or a memory limit may leave no room for a copy.
mx::array copy_to_gpu_memory(const mx::array& x, mx::Stream stream) {
  constexpr size_t kSmall = 1 << 20; // bytes
  if (stream.device != mx::Device::gpu || !mx::cu::is_available() || x.nbytes() < kSmall || has_memory_limit()) {
    return x;
  }
  const size_t width = x.itemsize();
  const mx::Dtype bits = width == 1 ? mx::uint8 : width == 2 ? mx::uint16 : width == 4 ? mx::uint32 : mx::uint64;
  // The result of a kernel that changes no bit. MLX would omit a plain copy.
  const auto copy = mx::bitwise_or(mx::view(x, bits, stream), mx::array(0, bits), stream);
  auto result = mx::view(copy, x.dtype(), stream);
  evaluate({result}, stream);
  return result;
}

[[noreturn]] void fail_missing(const char* kind, uint32_t slot, const char* name) {
  fail(Error::NotFound, kind, " ", slot, " \"", name ? name : "",
      "\" is neither in the program nor in a data file: a data file (.ptd) is missing, or is of another program");
}

// Returns the contents of a mutable buffer at load time: the named data of this name. If there is none, they are zeros,
// unless the name begins with that of a data file and a colon. `room` is the number of elements that this buffer and
// all later ones may have together. Subtracts the elements of this buffer from `room`.
mx::array initial_contents(const MlxProgram& program, uint32_t slot, const NamedDataMap* data, int64_t& room) {
  const auto& meta = program.meta(slot);
  const auto shape = static_shape(meta);
  const auto dtype = dtype_of(meta.scalar_type());
  check_size(shape, dtype);
  room -= std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  check_argument(room >= 0, "mutable buffers: got more elements than the option max_operations permits");
  const char* name = program.tensor_names[slot];
  if (auto buffer = find_data(data, name)) {
    auto contents = read_tensor(*buffer, meta, name, /*in_place=*/false);
    buffer->Free();
    return contents;
  }
  if (name != nullptr && std::strchr(name, ':') != nullptr) {
    fail_missing("the initial value of buffer", slot, name);
  }
  return allocate_zeros(shape, dtype);
}

// The key under which methods find tensors that they share: dtype, shape and name.
std::string sharing_key(const MlxProgram& program, uint32_t slot) {
  const char* name = program.tensor_names[slot];
  return str(describe(program.meta(slot)), " ", name ? name : "");
}

} // namespace

size_t bytes_to_load(const MlxProgram& program, const SharedData& shared, const Session& session) {
  size_t bytes = 0;
  std::set<std::string> keys;
  // Adds the size of a tensor if `always` is true, or if its key is new: neither in `pool` nor added before.
  const auto add = [&](uint32_t slot, const auto& pool, bool always) {
    const std::string key = sharing_key(program, slot);
    const bool is_new = pool.find(key) == nullptr && keys.insert(key).second;
    if (is_new || always) {
      const size_t more = bytes_of(program.meta(slot));
      bytes = bytes > std::numeric_limits<size_t>::max() - more ? std::numeric_limits<size_t>::max() : bytes + more;
    }
  };
  for (uint32_t i = 0; i < program.layout.constants; ++i) {
    add(i, shared.constants, program.tensor_names[i] == nullptr);
  }
  keys.clear();
  const bool has_init_chain = program.init_chain >= 0;
  for (uint32_t i = program.layout.buffers_begin(); i < program.layout.temps_begin(); ++i) {
    add(i, session.buffers, has_init_chain || program.tensor_names[i] == nullptr);
  }
  return bytes;
}

void set_on_load(OnLoad callback, void* user_data) { progress = {callback, user_data}; }

void load_constants(
    const MlxProgram& program, const NamedDataMap* data, SharedData& shared, State& state, mx::Stream stream) {
  size_t loaded = 0;
  size_t total = 0;
  for (uint32_t i = 0; i < program.layout.constants; ++i) {
    total += bytes_of(program.meta(i));
  }
  for (uint32_t i = 0; i < program.layout.constants; ++i) {
    const char* name = program.tensor_names[i];
    const std::string key = sharing_key(program, i);
    auto constant = name == nullptr ? nullptr : shared.constants.find(key);
    if (constant == nullptr) {
      auto buffer = find_data(data, name);
      if (!buffer) {
        fail_missing("constant", i, name);
      }
      const auto tensor = read_tensor(*buffer, program.meta(i), name, /*in_place=*/true);
      constant = std::make_shared<const mx::array>(copy_to_gpu_memory(tensor, stream));
      buffer->Free();
      shared.constants.put(key, constant);
    }
    state.set_constant(i, std::move(constant));
    loaded += bytes_of(program.meta(i));
    if (progress.callback != nullptr && !progress.callback(progress.user_data, loaded, total)) {
      fail(Error::InvalidState, "the load was aborted");
    }
  }
}

void fill_buffers(const MlxProgram& program, const NamedDataMap* data, State& state, mx::Stream stream) {
  int64_t room = std::numeric_limits<int64_t>::max(); // load_buffers() has checked the number of elements
  size_t bytes = 0;
  for (uint32_t i = program.layout.buffers_begin(); i < program.layout.temps_begin(); ++i) {
    bytes += bytes_of(program.meta(i));
  }
  {
    std::lock_guard lock(memory_mutex());
    check_memory([] { return "buffers"; }, bytes);
  }
  for (uint32_t i = program.layout.buffers_begin(); i < program.layout.temps_begin(); ++i) {
    state.tensors[i] = copy_to_gpu_memory(initial_contents(program, i, data, room), stream);
  }
}

void load_buffers(const MlxProgram& program, const NamedDataMap* data, Session& session, const Options& options,
    State& state, mx::Stream stream) {
  const auto& layout = program.layout;
  const bool has_init_chain = program.init_chain >= 0;
  std::set<std::string> keys;
  int64_t room = options.limits.operations;
  for (uint32_t i = layout.buffers_begin(); i < layout.temps_begin(); ++i) {
    const std::string key = sharing_key(program, i);
    const bool is_named = program.tensor_names[i] != nullptr;
    check_program(!is_named || keys.insert(key).second, "duplicate mutable buffer ", key);
    auto buffer = is_named ? session.buffers.find(key) : nullptr;
    const bool is_new = buffer == nullptr;
    if (is_new) {
      buffer = std::make_shared<Buffer>();
      if (is_named) {
        session.buffers.put(key, buffer);
      }
    }
    state.set_buffer(i, std::move(buffer));
    if (is_new || has_init_chain) {
      state.tensors[i] = copy_to_gpu_memory(initial_contents(program, i, data, room), stream);
    }
  }
  if (program.has_caches) {
    auto caches = session.caches.lock();
    if (caches == nullptr) {
      caches = std::make_shared<Caches>();
      caches->windows = options.kv_windows;
      session.caches = caches;
    }
    check_argument(caches->windows == options.kv_windows, "kv_windows: got ", dims(options.kv_windows), ", expected ",
        dims(caches->windows), " as for the other methods that share the KV caches");
    state.set_caches(std::move(caches));
  }
}

} // namespace executorch_mlx
