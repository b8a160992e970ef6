// Elementwise operations, one at a time and in sequence: see blas.h.
#include <algorithm>

#include "conversion.h"

namespace executorch_mlx {

namespace {

using Unary = void (*)(const float*, float*, ptrdiff_t);
using Binary = void (*)(const float*, const float*, float*, ptrdiff_t);

constexpr int64_t kBlock = 2048;  // elements that are converted at a time, so that they stay in the cache

// y[i] = function(a[i], b[i % period])
void binary(const void* a, const void* b, FloatType type, void* y, int64_t count, int64_t period, Binary function) {
  alignas(64) float number[kBlock];
  if (period == 1) {
    float first;
    std::fill_n(number, kBlock, *read_floats(b, type, 0, 1, &first));
  }
  parallel_ranges(count, 1, [&](int64_t first, int64_t last) {
    alignas(64) float a_buffer[kBlock], b_buffer[kBlock];
    for (int64_t i = first; i < last;) {
      int64_t length = std::min(kBlock, last - i);
      const float* bs = number;
      if (period > 1) {
        length = std::min(length, period - i % period);
        bs = read_floats(b, type, i % period, length, b_buffer);
      }
      const float* as = read_floats(a, type, i, length, a_buffer);
      write_floats(y, type, i, length, a_buffer, [&](float* to) { function(as, bs, to, length); });
      i += length;
    }
  });
}

void unary(const void* x, FloatType type, void* y, int64_t count, Unary function) {
  parallel_ranges(count, 1, [&](int64_t first, int64_t last) {
    alignas(64) float buffer[kBlock];
    for (int64_t i = first; i < last; i += kBlock) {
      const int64_t length = std::min(kBlock, last - i);
      const float* xs = read_floats(x, type, i, length, buffer);
      write_floats(y, type, i, length, buffer, [&](float* to) { function(xs, to, length); });
    }
  });
}

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
    default:
      return [](const float* x, float* y, ptrdiff_t count) { std::copy_n(x, count, y); };
  }
}

void compute(const ElementwiseStep& step, int64_t rows) {
  const auto [operation, a, b, y, width] = step;
  const bool is_dense = a.stride == width && (!is_binary(operation) || b.stride == width);
  const int64_t parts = is_dense ? 1 : rows;
  const int64_t count = is_dense ? rows * width : width;
  if (is_binary(operation)) {
    const Binary kernel = binary_kernel(operation);
    for (int64_t i = 0; i < parts; ++i) {
      kernel(a.data + i * a.stride, b.data + i * b.stride, y + i * width, count);
    }
  } else {
    const Unary kernel = unary_kernel(operation);
    for (int64_t i = 0; i < parts; ++i) {
      kernel(a.data + i * a.stride, y + i * width, count);
    }
  }
}

} // namespace

} // namespace executorch_mlx

extern "C" void executorch_mlx_elementwise_steps(
    const executorch_mlx::ElementwiseStep* steps, int count, int64_t rows) {
  for (int i = 0; i < count; ++i) {
    executorch_mlx::compute(steps[i], rows);
  }
}

extern "C" void executorch_mlx_add(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period) {
  executorch_mlx::binary(a, b, type, y, count, period, executorch_mlx::kernels().add);
}

extern "C" void executorch_mlx_multiply(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period) {
  executorch_mlx::binary(a, b, type, y, count, period, executorch_mlx::kernels().multiply);
}

extern "C" void executorch_mlx_subtract(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period) {
  executorch_mlx::binary(a, b, type, y, count, period, executorch_mlx::kernels().subtract);
}

extern "C" void executorch_mlx_convert(
    const void* x, executorch_mlx::FloatType x_type, void* y, executorch_mlx::FloatType y_type, int64_t count) {
  using namespace executorch_mlx;
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

extern "C" void executorch_mlx_silu(const void* x, executorch_mlx::FloatType type, void* y, int64_t count) {
  executorch_mlx::unary(x, type, y, count, executorch_mlx::kernels().silu);
}

extern "C" void executorch_mlx_sigmoid(const void* x, executorch_mlx::FloatType type, void* y, int64_t count) {
  executorch_mlx::unary(x, type, y, count, executorch_mlx::kernels().sigmoid);
}

extern "C" void executorch_mlx_tanh(const void* x, executorch_mlx::FloatType type, void* y, int64_t count) {
  executorch_mlx::unary(x, type, y, count, executorch_mlx::kernels().tanh);
}
