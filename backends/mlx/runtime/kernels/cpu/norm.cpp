// RMSNorm and LayerNorm.
#include "norm.h"

#include "conversion.h"

namespace executorch_mlx {

void kernel::norm(const void* x, FloatType type, bool subtracts_mean, const void* weight, const void* bias,
    FloatType weight_type, void* y, int64_t rows, int64_t width, float eps) {
  const AsFloats weights(weight, weight_type, width), biases(bias, weight_type, width);
  parallel_ranges(rows, width, [&](int64_t first, int64_t last) {
    kernels().norm(at(x, type, first * width), type, subtracts_mean, weights.get(), biases.get(),
        at(y, type, first * width), last - first, width, eps);
  });
}

} // namespace executorch_mlx
