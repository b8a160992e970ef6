#include "pool.h"
#include "simd/kernels.h"

extern "C" void executorch_mlx_silu(const float* x, float* y, int64_t count) {
  using namespace executorch_mlx;
  parallel_ranges(count, 1, [&](int64_t first, int64_t last) { kernels().silu(x + first, y + first, last - first); });
}
