#include "memory/host_memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "dtype.h"
#include "memory/limit.h"
#include "memory/strided_copy.h"

namespace executorch_mlx {

namespace {

using executorch::runtime::FreeableBuffer;

// Makes memory of ExecuTorch look like a block of MLX's CPU allocator, so that an array can use it without a copy. Such
// a block is a size_t with the size of the data, followed by the data. An Adopted begins with the same size_t, but its
// data lies elsewhere. The array therefore stores the offset from the place where MLX expects the data to the place
// where the data is.
struct Adopted {
  explicit Adopted(FreeableBuffer&& data) : size(data.size()), data(std::move(data)), counted(size) {}

  size_t size;
  FreeableBuffer data;
  InPlaceBytes counted; // adds the size to the active memory while this exists
};

// Whether MLX allocates with its CPU allocator, which is recognized by the layout of a block: a size_t and then the
// data.
bool uses_cpu_allocator() {
  static const bool answer = [] {
    auto probe = mx::allocator::malloc(64);
    auto buffer = probe.buffer();
    return static_cast<char*>(buffer.raw_ptr()) == static_cast<char*>(buffer.ptr()) + sizeof(size_t);
  }();
  return answer;
}

void fill_with_zeros(void* memory, size_t bytes) {
#if defined(__linux__)
  constexpr size_t kMinDiscardedBytes = 1 << 20; // for less memory, the system call is not worth its time
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const auto first = (begin + page - 1) / page * page;
  const auto last = (begin + bytes) / page * page;
  // The CPU allocator returns private anonymous pages. After MADV_DONTNEED, these read as zeros. madvise() fails for
  // locked pages and, on older kernels, for huge pages. If it fails, the last memset() writes the zeros.
  if (bytes >= kMinDiscardedBytes && uses_cpu_allocator() &&
      madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) == 0) {
    std::memset(memory, 0, first - begin);
    std::memset(reinterpret_cast<void*>(last), 0, begin + bytes - last);
    return;
  }
#endif
  std::memset(memory, 0, bytes);
}

} // namespace

mx::array without_memory(mx::Shape shape, mx::Dtype dtype) {
  return mx::array(mx::allocator::Data(mx::allocator::Buffer(nullptr), nullptr), std::move(shape), dtype);
}

mx::array allocate(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (const int size : shape) {
    bytes *= size;
  }
  check_memory([&] { return str(name(dtype), dims(shape)); }, bytes);
  auto memory = mx::allocator::malloc(bytes);
  if (bytes != 0 && memory.buffer().ptr() == nullptr) {
    throw std::bad_alloc();
  }
  return mx::array(std::move(memory), shape, dtype);
}

mx::array allocate_zeros(const mx::Shape& shape, mx::Dtype dtype) {
  auto zeros = allocate(shape, dtype);
  fill_with_zeros(zeros.data<char>(), zeros.nbytes());
  return zeros;
}

std::optional<mx::array> adopt(FreeableBuffer& data, const mx::Shape& shape, mx::Dtype dtype) {
  const auto address = reinterpret_cast<uintptr_t>(data.data());
  if (address == 0 || data.size() == 0 || address % mx::size_of(dtype) != 0 || !uses_cpu_allocator()) {
    return std::nullopt;
  }
  auto adopted = std::make_shared<Adopted>(std::move(data));
  mx::allocator::Buffer buffer(adopted.get());
  const auto offset = static_cast<int64_t>(address - reinterpret_cast<uintptr_t>(buffer.raw_ptr()));

  mx::array array = without_memory(shape, dtype);
  const auto longest = shape.empty() ? 1 : *std::max_element(shape.begin(), shape.end());
  mx::array::Flags flags{};
  flags.contiguous = true;
  flags.row_contiguous = true;
  flags.col_contiguous = static_cast<size_t>(longest) == array.size();
  array.set_data(mx::allocator::Data(buffer, [adopted = std::move(adopted)](mx::allocator::Buffer) {}), array.size(),
      row_major_strides(shape), flags, offset);
  return array;
}

} // namespace executorch_mlx
