// Convolutions.
#pragma once

#include <cstdint>

#include "api.h"

namespace executorch_mlx::kernel {

// A spatial axis of a convolution.
struct WindowAxis {
  int64_t size; // of x
  int64_t result; // the number of positions of the window
  int64_t window; // the number of elements of the window
  int64_t stride;
  int64_t padding; // zeros before x
  int64_t dilation;
};

// The convolution y [batch, results..., groups * outputs] of x [batch, sizes..., groups * inputs] with w [groups *
// outputs, windows..., inputs], in two steps: pack_convolution() writes the weights in the order in which
// convolution() reads them, as convolution_weights() floats. Both steps must use the same
// kernels.
struct Convolution {
  int64_t batch;
  int32_t groups;
  int32_t inputs; // channels of x in a group
  int32_t outputs; // channels of y in a group
  WindowAxis axes[3];
};
EXECUTORCH_MLX_KERNEL_API int64_t convolution_weights(const Convolution& c);
EXECUTORCH_MLX_KERNEL_API void pack_convolution(const Convolution& c, const float* w, float* packed);
EXECUTORCH_MLX_KERNEL_API void convolution(const Convolution& c, const float* x, const float* packed, float* y);

} // namespace executorch_mlx::kernel
