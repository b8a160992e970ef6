#include "mlx_internals/arrays.h"

#include <mlx/primitives.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <utility>

#include "dtype.h"

namespace executorch_mlx::internals {

namespace {

// Whether the elements of a non-empty array lie in memory without gaps, with the last axis innermost.
bool is_row_major(const mx::Shape& shape, const mx::Strides& strides) {
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] != 1 && strides[i] != expected) {
      return false;
    }
    expected *= shape[i];
  }
  return true;
}

// Looks like a block of MLX's CPU allocator. Such a block is a size_t with the size of the data, followed by the data.
// The data of this one lies elsewhere: the array stores the offset to it from the place where MLX expects it.
struct Block {
  size_t size;
  std::shared_ptr<void> owner;
};

// Places an array, which has no memory yet, in a buffer, `offset` bytes after its beginning.
void place_in_buffer(mx::array& x, mx::allocator::Data data, int64_t offset) {
  const auto longest = x.ndim() == 0 ? 1 : *std::max_element(x.shape().begin(), x.shape().end());
  mx::array::Flags flags{};
  flags.contiguous = true;
  flags.row_contiguous = true;
  flags.col_contiguous = static_cast<size_t>(longest) == x.size();
  x.set_data(std::move(data), x.size(), row_major_strides(x.shape()), flags, offset);
}

} // namespace

mx::Strides row_major_strides(const mx::Shape& shape) {
  mx::Strides strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

mx::array view(const mx::array& x, mx::Shape shape, mx::Strides strides, int64_t offset) {
  mx::array y(std::move(shape), x.dtype(), nullptr, {});
  int64_t span = 1; // from the first to the last element in memory
  for (size_t i = 0; i < y.ndim(); ++i) {
    span += strides[i] * (y.shape(static_cast<int>(i)) - 1);
  }
  const auto reversed = [](auto list) {
    std::reverse(list.begin(), list.end());
    return list;
  };
  mx::array::Flags flags{};
  flags.row_contiguous = is_row_major(y.shape(), strides);
  flags.col_contiguous = is_row_major(reversed(y.shape()), reversed(strides));
  flags.contiguous = flags.row_contiguous || flags.col_contiguous;
  y.copy_shared_buffer(x, strides, flags, static_cast<size_t>(span), offset);
  y.set_status(mx::array::Status::available);
  return y;
}

mx::array new_array(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (const int size : shape) {
    bytes *= size;
  }
  auto memory = mx::allocator::malloc(bytes);
  if (bytes != 0 && memory.buffer().ptr() == nullptr) {
    throw std::bad_alloc();
  }
  return mx::array(std::move(memory), shape, dtype);
}

mx::array without_memory(mx::Shape shape, mx::Dtype dtype) {
  return mx::array(mx::allocator::Data(mx::allocator::Buffer(nullptr), nullptr), std::move(shape), dtype);
}

bool uses_cpu_allocator() {
  static const bool answer = [] {
    auto probe = mx::allocator::malloc(64);
    auto buffer = probe.buffer();
    return static_cast<char*>(buffer.raw_ptr()) == static_cast<char*>(buffer.ptr()) + sizeof(size_t);
  }();
  return answer;
}

mx::array array_in(const void* address, const mx::Shape& shape, mx::Dtype dtype, std::shared_ptr<void> owner) {
  mx::array x = without_memory(shape, dtype);
  auto block = std::make_shared<Block>(Block{x.nbytes(), std::move(owner)});
  mx::allocator::Buffer buffer(block.get());
  const auto offset =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(buffer.raw_ptr()));
  place_in_buffer(x, mx::allocator::Data(buffer, [block = std::move(block)](mx::allocator::Buffer) {}), offset);
  return x;
}

std::optional<mx::array> array_in_pages(
    const void* address, const mx::Shape& shape, mx::Dtype dtype, std::shared_ptr<void> owner) {
  mx::array x = without_memory(shape, dtype);
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto begin = at / page * page;
  const auto end = (at + x.nbytes() + page - 1) / page * page;
  const auto buffer = mx::allocator::make_buffer(reinterpret_cast<void*>(begin), end - begin);
  if (buffer.ptr() == nullptr) {
    return std::nullopt;
  }
  mx::allocator::Data data(
      buffer, [owner = std::move(owner)](mx::allocator::Buffer used) { mx::allocator::release(used); });
  place_in_buffer(x, std::move(data), static_cast<int64_t>(at - begin));
  return x;
}

mx::array lend(mx::array piece, std::function<void(mx::array)> release) {
  const auto buffer = piece.buffer();
  const mx::Shape shape{static_cast<int>(piece.nbytes())};
  mx::allocator::Data data(
      buffer, [piece = std::move(piece), release = std::move(release)](mx::allocator::Buffer) mutable {
        release(std::move(piece));
      });
  return mx::array(std::move(data), shape, mx::uint8);
}

mx::array array_in(const mx::array& x, const mx::Shape& shape, mx::Dtype dtype) {
  mx::array y(shape, dtype, nullptr, {});
  place(y, x, 0);
  y.set_status(mx::array::Status::available);
  return y;
}

const void* memory_of(const mx::array& x) { return x.data_shared_ptr().get(); }

bool is_sole_user(const mx::array& x) { return x.data_shared_ptr().use_count() == 1; }

bool can_take_over(const mx::array& x) {
  return x.status() != mx::array::Status::unscheduled && x.data_shared_ptr() && !is_sole_user(x) &&
      x.data_shared_ptr()->is_owned();
}

mx::array take_over(const mx::array& x) {
  mx::array own = without_memory(x.shape(), x.dtype());
  own.set_data(std::move(*x.data_shared_ptr()), x.data_size(), x.strides(), x.flags(), x.offset());
  return own;
}

void wait_as(mx::array& x, const mx::array& other) {
  x.attach_event(other.event());
  x.set_status(other.status());
}

void place(mx::array& y, const mx::array& x, int64_t offset) {
  const bool is_vector = std::count_if(y.shape().begin(), y.shape().end(), [](int n) { return n != 1; }) <= 1;
  const mx::array::Flags flags{/*contiguous=*/true, /*row_contiguous=*/true, /*col_contiguous=*/is_vector};
  y.copy_shared_buffer(x, y.strides(), flags, y.size(), offset);
}

void place(mx::array& y, const mx::array& x) { y.copy_shared_buffer(x); }

namespace {

// The input itself, which runs nothing.
class Later : public mx::Primitive {
 public:
  using Primitive::Primitive;
  const char* name() const override { return "Later"; }
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    place(outputs[0], inputs[0]);
  }
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    place(outputs[0], inputs[0]);
  }
};

} // namespace

void wait_for_stream(std::vector<mx::array>& arrays, mx::Stream stream) {
  const mx::array& x = arrays[0];
  mx::array later(x.shape(), x.dtype(), std::make_shared<Later>(stream), {x});
  mx::async_eval({later});
  for (mx::array& y : arrays) {
    wait_as(y, later);
  }
}

} // namespace executorch_mlx::internals
