#include "conversion.h"

extern "C" void executorch_mlx_silu(const void* x, executorch_mlx::FloatType type, void* y, int64_t count) {
  using namespace executorch_mlx;
  const AsFloats xs(x, type, count);
  compute_as(y, type, count, [&](float* y) {
    parallel_ranges(
        count, 1, [&](int64_t first, int64_t last) { kernels().silu(xs.get() + first, y + first, last - first); });
  });
}
