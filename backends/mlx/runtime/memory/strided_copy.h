// Copies between arrays with strides.
#pragma once

#include <mlx/mlx.h>

namespace executorch_mlx {

namespace mx = mlx::core;

// Copies elements of `width` bytes. Strides count elements. The two arrays do not overlap in memory.
void strided_copy(const mx::Shape& shape, size_t width, const char* from, const mx::Strides& from_strides, char* to,
    const mx::Strides& to_strides);

} // namespace executorch_mlx
