#include "pool.h"
#include "simd/kernels.h"

extern "C" void executorch_mlx_rms_norm(
    const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
  using namespace executorch_mlx;
  parallel_ranges(rows, width, [&](int64_t first, int64_t last) {
    kernels().rms_norm(x + first * width, weight, y + first * width, last - first, width, eps);
  });
}
