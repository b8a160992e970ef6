// RMSNorm and LayerNorm.
#pragma once

#include <cstdint>

#include "api.h"
#include "float_type.h"

namespace executorch_mlx::kernel {

// y = x / sqrt(mean(x^2) + eps) * weight for each row of x [rows, width]. x and y have elements of `type`.
// weight [width] may be null.
EXECUTORCH_MLX_KERNEL_API void rms_norm(const void* x, FloatType type, const void* weight, FloatType weight_type,
    void* y, int64_t rows, int64_t width, float eps);

// y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias for each row of x [rows, width]. weight [width]
// and bias [width], of the type `weight_type`, may be null.
EXECUTORCH_MLX_KERNEL_API void layer_norm(const void* x, FloatType type, const void* weight, const void* bias,
    FloatType weight_type, void* y, int64_t rows, int64_t width, float eps);

} // namespace executorch_mlx::kernel
