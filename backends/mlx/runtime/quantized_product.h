#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// float32 [..., n] = x, float32 [..., k], times the transpose of w [n, k] in MLX's affine packing;
// scales and biases are of any float type. On a CPU stream, where MLX has one thread and no kernel
// for half precision; nothing where this library has no kernel either.
std::optional<mx::array> quantized_product(
    const mx::array& x,
    const mx::array& w,
    const mx::array& scales,
    const mx::array& biases,
    int group_size,
    int bits,
    mx::Stream stream);

} // namespace executorch_mlx
