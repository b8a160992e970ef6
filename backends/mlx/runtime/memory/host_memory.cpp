#include "memory/host_memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "dtype.h"
#include "memory/limit.h"
#include "mlx_internals/arrays.h"
#include "mlx_internals/internals.h"

namespace executorch_mlx {

namespace {

using executorch::runtime::FreeableBuffer;

// Memory of ExecuTorch that arrays use.
struct Adopted {
  explicit Adopted(FreeableBuffer&& data) : data(std::move(data)), counted(this->data.size()) {}

  FreeableBuffer data;
  InPlaceBytes counted; // adds the size to the active memory while this exists
};

// A buffer of less memory is not worth the entry that it takes in the tables of the GPU. A page of Apple devices.
constexpr size_t kMinPageBytes = 16 << 10;

void fill_with_zeros(void* memory, size_t bytes) {
#if defined(__linux__)
  constexpr size_t kMinDiscardedBytes = 1 << 20; // for less memory, the system call is not worth its time
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const auto first = (begin + page - 1) / page * page;
  const auto last = (begin + bytes) / page * page;
  // The CPU allocator returns private anonymous pages. After MADV_DONTNEED, these read as zeros. madvise() fails for
  // locked pages and, on older kernels, for huge pages. If it fails, the last memset() writes the zeros.
  if (bytes >= kMinDiscardedBytes && internals::are_usable() && internals::uses_cpu_allocator() &&
      madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED) == 0) {
    std::memset(memory, 0, first - begin);
    std::memset(reinterpret_cast<void*>(last), 0, begin + bytes - last);
    return;
  }
#endif
  std::memset(memory, 0, bytes);
}

} // namespace

mx::array allocate(const mx::Shape& shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (const int size : shape) {
    bytes *= size;
  }
  check_memory([&] { return str(name(dtype), dims(shape)); }, bytes);
  return internals::new_array(shape, dtype);
}

mx::array allocate_zeros(const mx::Shape& shape, mx::Dtype dtype) {
  auto zeros = allocate(shape, dtype);
  fill_with_zeros(zeros.data<char>(), zeros.nbytes());
  return zeros;
}

std::optional<mx::array> adopt(FreeableBuffer& data, const mx::Shape& shape, mx::Dtype dtype) {
  const auto address = reinterpret_cast<uintptr_t>(data.data());
  if (address == 0 || data.size() == 0 || address % mx::size_of(dtype) != 0 || !internals::are_usable()) {
    return std::nullopt;
  }
  if (!internals::uses_cpu_allocator()) {
    if (data.size() < kMinPageBytes) {
      return std::nullopt;
    }
    auto kept = std::make_shared<std::optional<FreeableBuffer>>(); // MLX counts the bytes of the buffer itself
    auto array = internals::array_in_pages(data.data(), shape, dtype, kept);
    if (array) {
      kept->emplace(std::move(data));
    }
    return array;
  }
  auto adopted = std::make_shared<Adopted>(std::move(data));
  const void* const memory = adopted->data.data();
  return internals::array_in(memory, shape, dtype, std::move(adopted));
}

} // namespace executorch_mlx
