// Softmax and log-sum-exp.
#pragma once

#include <cstdint>

#include "api.h"

namespace executorch_mlx::kernel {

// y = exp(x) / sum(exp(x)) for each row of x [rows, width], width > 0. A row with a NaN, with infinity, or with minus
// infinity only becomes NaN, as in torch.
EXECUTORCH_MLX_KERNEL_API void softmax(const float* x, float* y, int64_t rows, int64_t width);

// y [rows] = log(sum(exp(x))) for each row of x [rows, width], width > 0.
EXECUTORCH_MLX_KERNEL_API void logsumexp(const float* x, float* y, int64_t rows, int64_t width);

} // namespace executorch_mlx::kernel
