#include "conversion.h"

extern "C" void executorch_mlx_rms_norm(
    const void* x, executorch_mlx::FloatType type, const void* weight, executorch_mlx::FloatType weight_type, void* y,
    int64_t rows, int64_t width, float eps) {
  using namespace executorch_mlx;
  const AsFloats weights(weight, weight_type, width);
  const AsFloats xs(x, type, rows * width);
  compute_as(y, type, rows * width, [&](float* y) {
    parallel_ranges(rows, width, [&](int64_t first, int64_t last) {
      kernels().rms_norm(xs.get() + first * width, weights.get(), y + first * width, last - first, width, eps);
    });
  });
}
