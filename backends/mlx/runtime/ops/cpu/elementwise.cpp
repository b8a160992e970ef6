// Single elementwise operations, conversions, copies and concatenation: see cpu_kernels.h.
#include <algorithm>

#include "memory/strided_copy.h"
#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/elementwise.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

namespace {

// Whether b, repeated in whole, has the shape of a: b has one element, or its axes are the last axes of a.
bool repeats_in(const mx::array& b, const mx::array& a) {
  return b.size() == 1 ? b.ndim() <= a.ndim()
                       : b.ndim() <= a.ndim() && std::equal(b.shape().rbegin(), b.shape().rend(), a.shape().rbegin());
}

// Returns the result of the kernel, or nullopt if the kernel does not support the operands or one of them is lazy. MLX
// can fuse operations on lazy operands.
std::optional<mx::array> binary(
    const char* name, Elementwise operation, const mx::array& a, const mx::array& b, mx::Stream stream) {
  if (!is_supported_operand(a, stream) || b.dtype() != a.dtype() || !repeats_in(b, a) || !are_available({a, b})) {
    return std::nullopt;
  }
  const auto make_task = [operation](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto period = static_cast<int64_t>(inputs[1].size());
    const auto count = static_cast<int64_t>(out.size());
    return [=, a = inputs[0].data<void>(), b = inputs[1].data<void>(), type = *float_type(out.dtype()),
               y = out.data<void>()] { kernel::binary(operation, a, b, type, y, count, period); };
  };
  return kernel_result(name, a.shape(), a.dtype(), {contiguous(a, stream), contiguous(b, stream)}, stream, make_task);
}

std::optional<mx::array> unary(const char* name, Elementwise operation, const mx::array& x, mx::Stream stream) {
  if (!is_supported_operand(x, stream)) {
    return std::nullopt;
  }
  const auto make_task = [operation](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto count = static_cast<int64_t>(out.size());
    return [=, x = inputs[0].data<void>(), type = *float_type(out.dtype()), y = out.data<void>()] {
      kernel::unary(operation, x, type, y, count);
    };
  };
  return kernel_result(name, x.shape(), x.dtype(), {contiguous(x, stream)}, stream, make_task);
}

} // namespace

std::optional<mx::array> add(const mx::array& a, const mx::array& b, mx::Stream stream) {
  const auto y = binary("Add", Elementwise::add, a, b, stream);
  return y ? y : binary("Add", Elementwise::add, b, a, stream);
}

std::optional<mx::array> subtract(const mx::array& a, const mx::array& b, mx::Stream stream) {
  return binary("Subtract", Elementwise::subtract, a, b, stream);
}

std::optional<mx::array> multiply(const mx::array& a, const mx::array& b, mx::Stream stream) {
  const auto y = binary("Multiply", Elementwise::multiply, a, b, stream);
  return y ? y : binary("Multiply", Elementwise::multiply, b, a, stream);
}

std::optional<mx::array> convert(const mx::array& x, mx::Dtype dtype, mx::Stream stream) {
  const auto to = float_type(dtype);
  const bool has_kernel = to && x.dtype() != dtype && (x.dtype() == mx::float32 || dtype == mx::float32);
  if (!has_kernel || !is_supported_operand(x, stream) || !x.is_available()) {
    return std::nullopt;
  }
  const auto dense = contiguous(x, stream);
  auto y = allocate_result(x.shape(), dtype);
  kernel::convert(dense.data<void>(), *float_type(x.dtype()), y.data<void>(), *to, static_cast<int64_t>(x.size()));
  return y;
}

std::optional<mx::array> exp(const mx::array& x, mx::Stream stream) {
  return unary("Exp", Elementwise::exp, x, stream);
}

std::optional<mx::array> silu(const mx::array& x, mx::Stream stream) {
  return unary("Silu", Elementwise::silu, x, stream);
}

std::optional<mx::array> sigmoid(const mx::array& x, mx::Stream stream) {
  return unary("Sigmoid", Elementwise::sigmoid, x, stream);
}

std::optional<mx::array> tanh(const mx::array& x, mx::Stream stream) {
  return unary("Tanh", Elementwise::tanh, x, stream);
}

std::optional<mx::array> copy(const mx::array& x, mx::Stream stream) {
  if (!computes_at_once(stream) || !x.is_available()) {
    return std::nullopt;
  }
  auto y = allocate_result(x.shape(), x.dtype());
  strided_copy(x.shape(), x.itemsize(), x.data<char>(), x.strides(), y.data<char>(), y.strides());
  return y;
}

std::optional<mx::array> concatenate(const std::vector<mx::array>& arrays, int axis, mx::Stream stream) {
  auto shape = arrays[0].shape();
  shape[axis] = 0;
  for (const auto& x : arrays) {
    if (!is_supported_operand(x, stream) || x.dtype() != arrays[0].dtype() || x.ndim() != shape.size() ||
        !x.is_available()) {
      return std::nullopt;
    }
    shape[axis] += x.shape(axis);
    auto expected = shape;
    expected[axis] = x.shape(axis);
    if (x.shape() != expected) {
      return std::nullopt;
    }
  }
  auto result = allocate_result(shape, arrays[0].dtype());
  auto* to = result.data<char>();
  for (const auto& x : arrays) {
    strided_copy(x.shape(), x.itemsize(), x.data<char>(), x.strides(), to, result.strides());
    to += result.strides(axis) * x.shape(axis) * static_cast<int64_t>(x.itemsize());
  }
  return result;
}

} // namespace executorch_mlx::cpu
