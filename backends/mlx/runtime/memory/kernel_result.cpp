#include "memory/kernel_result.h"

#include <algorithm>
#include <mutex>

#include "memory/host_memory.h"
#include "memory/limit.h"
#include "memory/strided_copy.h"
#include "mlx_internals/internals.h"

namespace executorch_mlx::cpu {

bool are_available(const std::vector<mx::array>& arrays) {
  return std::all_of(arrays.begin(), arrays.end(), [](const mx::array& x) { return x.is_available(); });
}

bool computes_at_once(mx::Stream stream) {
  return kHasKernels && stream.device == mx::Device::cpu && internals::are_usable();
}

bool is_supported_operand(const mx::array& x, mx::Stream stream) {
  return computes_at_once(stream) && float_type(x.dtype()) && x.size() > 0 && x.ndim() > 0;
}

std::optional<FloatType> float_type(mx::Dtype dtype) {
  switch (dtype) {
    case mx::float32:
      return FloatType::float32;
    case mx::float16:
      return FloatType::float16;
    case mx::bfloat16:
      return FloatType::bfloat16;
    default:
      return std::nullopt;
  }
}

mx::array allocate_result(const mx::Shape& shape, mx::Dtype dtype) {
  std::unique_lock<std::mutex> lock;
  if (has_memory_limit()) {
    lock = std::unique_lock(memory_mutex());
  }
  return allocate(shape, dtype);
}

std::optional<int64_t> row_stride(const mx::array& x) {
  const int last = static_cast<int>(x.ndim()) - 1;
  if (x.shape(last) != 1 && x.strides(last) != 1) {
    return std::nullopt;
  }
  std::optional<int64_t> innermost; // of the axes before the last one
  int64_t expected = 0; // the stride that the next axis must have
  for (int axis = last; axis-- > 0;) {
    if (x.shape(axis) == 1) {
      continue;
    }
    if (innermost && x.strides(axis) != expected) {
      return std::nullopt;
    }
    innermost = innermost.value_or(x.strides(axis));
    expected = x.strides(axis) * x.shape(axis);
  }
  return innermost.value_or(x.shape(last));
}

mx::array contiguous(const mx::array& x, mx::Stream stream) {
  if (!x.is_available()) {
    return mx::contiguous(x, /*allow_col_major=*/false, stream);
  }
  if (x.flags().row_contiguous) {
    return x;
  }
  auto copy = allocate_result(x.shape(), x.dtype());
  strided_copy(x.shape(), x.itemsize(), x.data<char>(), x.strides(), copy.data<char>(), copy.strides());
  return copy;
}

} // namespace executorch_mlx::cpu
