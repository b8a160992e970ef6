// Elementwise operations.
#pragma once

#include <cstdint>

#include "api.h"
#include "elementwise_step.h"
#include "float_type.h"

namespace executorch_mlx::kernel {

// y[i] = x[i] for i < count, rounded to the nearest value of `y_type`; ties to even. One of the types is float32.
EXECUTORCH_MLX_KERNEL_API void convert(const void* x, FloatType x_type, void* y, FloatType y_type, int64_t count);

// y[i] = operation(a[i], b[i % period]) for i < count, a multiple of `period`. a, b and y have elements of `type`.
EXECUTORCH_MLX_KERNEL_API void binary(
    Elementwise operation, const void* a, const void* b, FloatType type, void* y, int64_t count, int64_t period);

// y = operation(x). x and y have elements of `type`.
EXECUTORCH_MLX_KERNEL_API void unary(Elementwise operation, const void* x, FloatType type, void* y, int64_t count);

// Computes the steps in order, for `rows` rows of elements of `type`, in the calling thread. A step may read the
// results of earlier steps.
EXECUTORCH_MLX_KERNEL_API void elementwise_steps(const ElementwiseStep* steps, int count, int64_t rows, FloatType type);

} // namespace executorch_mlx::kernel
