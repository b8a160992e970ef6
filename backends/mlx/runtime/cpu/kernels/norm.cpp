// RMSNorm: see blas.h.
#include "conversion.h"

extern "C" void executorch_mlx_rms_norm(
    const void* x, executorch_mlx::FloatType type, const void* weight, executorch_mlx::FloatType weight_type, void* y,
    int64_t rows, int64_t width, float eps) {
  using namespace executorch_mlx;
  const AsFloats weights(weight, weight_type, width);
  parallel_ranges(rows, width, [&](int64_t first, int64_t last) {
    const AlignedFloats buffer(type == FloatType::float32 ? 0 : width);
    for (int64_t row = first; row < last; ++row) {
      const float* from = read_floats(x, type, row * width, width, buffer.get());
      write_floats(y, type, row * width, width, buffer.get(), [&](float* to) {
        kernels().rms_norm(from, weights.get(), to, 1, width, eps);
      });
    }
  });
}
