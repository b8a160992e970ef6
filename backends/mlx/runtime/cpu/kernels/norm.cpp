// RMSNorm: see blas.h.
#include "conversion.h"

extern "C" void executorch_mlx_rms_norm(
    const void* x, executorch_mlx::FloatType type, const void* weight, executorch_mlx::FloatType weight_type, void* y,
    int64_t rows, int64_t width, float eps) {
  using namespace executorch_mlx;
  const AsFloats weights(weight, weight_type, width);
  parallel_ranges(rows, width, [&](int64_t first, int64_t last) {
    kernels().rms_norm(
        at(x, type, first * width), type, weights.get(), at(y, type, first * width), last - first, width, eps);
  });
}
