// RMSNorm and LayerNorm.
#pragma once

#include <cstdint>

#include "api.h"
#include "float_type.h"

namespace executorch_mlx::kernel {

// y = (x - c) / sqrt(mean((x - c)^2) + eps) * weight + bias for each row of x [rows, width], where c is mean(x) for
// LayerNorm, and 0 for RMSNorm. x and y have elements of `type`. weight [width] and bias [width], of the type
// `weight_type`, may be null.
EXECUTORCH_MLX_KERNEL_API void norm(const void* x, FloatType type, bool subtracts_mean, const void* weight,
    const void* bias, FloatType weight_type, void* y, int64_t rows, int64_t width, float eps);

} // namespace executorch_mlx::kernel
