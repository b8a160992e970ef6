#include "conversion.h"

namespace executorch_mlx {

namespace {

// y[i] = operation(a[i], b[i % period])
template <typename Operation>
void binary(
    const void* a, const void* b, FloatType type, void* y, int64_t count, int64_t period, const Operation& operation) {
  const AsFloats as(a, type, count);
  const AsFloats bs(b, type, period);
  compute_as(y, type, count, [&](float* y) {
    parallel_ranges(count / period, period, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const float* from = as.get() + row * period;
        float* to = y + row * period;
        for (int64_t i = 0; i < period; ++i) {
          to[i] = operation(from[i], bs.get()[i]);
        }
      }
    });
  });
}

void unary(
    const void* x, FloatType type, void* y, int64_t count, void (*function)(const float*, float*, ptrdiff_t)) {
  const AsFloats xs(x, type, count);
  compute_as(y, type, count, [&](float* y) {
    parallel_ranges(
        count, 1, [&](int64_t first, int64_t last) { function(xs.get() + first, y + first, last - first); });
  });
}

} // namespace

} // namespace executorch_mlx

extern "C" void executorch_mlx_add(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period) {
  executorch_mlx::binary(a, b, type, y, count, period, [](float a, float b) { return a + b; });
}

extern "C" void executorch_mlx_multiply(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period) {
  executorch_mlx::binary(a, b, type, y, count, period, [](float a, float b) { return a * b; });
}

extern "C" void executorch_mlx_subtract(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period) {
  executorch_mlx::binary(a, b, type, y, count, period, [](float a, float b) { return a - b; });
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
