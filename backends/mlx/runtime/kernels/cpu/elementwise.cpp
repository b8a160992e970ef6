// Elementwise operations, one at a time and in sequence.
#include <algorithm>
#include <cstring>

#include "conversion.h"
#include "elementwise.h"

namespace executorch_mlx {

namespace {

using Unary = decltype(Kernels::silu);
using Binary = decltype(Kernels::add);

Binary binary_kernel(Elementwise operation) {
  switch (operation) {
    case Elementwise::add:
      return kernels().add;
    case Elementwise::subtract:
      return kernels().subtract;
    case Elementwise::multiply:
      return kernels().multiply;
    default:
      return kernels().maximum;
  }
}

Unary unary_kernel(Elementwise operation) {
  switch (operation) {
    case Elementwise::sigmoid:
      return kernels().sigmoid;
    case Elementwise::silu:
      return kernels().silu;
    case Elementwise::tanh:
      return kernels().tanh;
    case Elementwise::gelu:
      return kernels().gelu;
    case Elementwise::gelu_tanh:
      return kernels().gelu_tanh;
    case Elementwise::erf:
      return kernels().erf;
    case Elementwise::exp:
      return kernels().exponential;
    default:
      return [](const void* x, FloatType type, void* y, ptrdiff_t count) { std::memcpy(y, x, count * size_of(type)); };
  }
}

void compute(const ElementwiseStep& step, int64_t rows, FloatType type) {
  const auto [operation, a, b, y, width] = step;
  const bool is_dense = a.stride == width && (!is_binary(operation) || b.stride == width);
  const int64_t parts = is_dense ? 1 : rows;
  const int64_t count = is_dense ? rows * width : width;
  for (int64_t i = 0; i < parts; ++i) {
    const void* x = at(a.data, type, i * a.stride);
    void* to = at(y, type, i * width);
    if (is_binary(operation)) {
      binary_kernel(operation)(x, at(b.data, type, i * b.stride), type, to, count);
    } else {
      unary_kernel(operation)(x, type, to, count);
    }
  }
}

} // namespace

void kernel::elementwise_steps(const ElementwiseStep* steps, int count, int64_t rows, FloatType type) {
  for (int i = 0; i < count; ++i) {
    compute(steps[i], rows, type);
  }
}

void kernel::binary(
    Elementwise operation, const void* a, const void* b, FloatType type, void* y, int64_t count, int64_t period) {
  const Binary function = binary_kernel(operation);
  constexpr int64_t kCopies = 2048;
  alignas(64) char number[kCopies * sizeof(float)]; // copies of b, if it is a single number
  if (period == 1) {
    for (int64_t i = 0; i < kCopies; ++i) {
      std::memcpy(number + i * size_of(type), b, size_of(type));
    }
  }
  parallel_ranges(count, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last;) {
      const int64_t index = i % period;
      const int64_t length = std::min(last - i, period == 1 ? kCopies : period - index);
      function(at(a, type, i), period == 1 ? number : at(b, type, index), type, at(y, type, i), length);
      i += length;
    }
  });
}

void kernel::unary(Elementwise operation, const void* x, FloatType type, void* y, int64_t count) {
  const Unary function = unary_kernel(operation);
  parallel_ranges(count, 1,
      [&](int64_t first, int64_t last) { function(at(x, type, first), type, at(y, type, first), last - first); });
}

void kernel::convert(const void* x, FloatType x_type, void* y, FloatType y_type, int64_t count) {
  parallel_ranges(count, 1, [&](int64_t first, int64_t last) {
    if (y_type == FloatType::float32) {
      const auto* from = static_cast<const uint16_t*>(x) + first;
      kernels().widen(from, x_type, 1, static_cast<float*>(y) + first, last - first);
    } else {
      const auto* from = static_cast<const float*>(x) + first;
      kernels().narrow(from, y_type, static_cast<uint16_t*>(y) + first, last - first);
    }
  });
}

} // namespace executorch_mlx
