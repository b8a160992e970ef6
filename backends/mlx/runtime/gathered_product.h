#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// Products of float32 matrices x [..., m, k] with chosen ones out of many, on a CPU stream: y[i] is
// x[lhs[i]] times matrix rhs[i], [..., m, n]. MLX makes one small product after the other; here all rows
// that chose the same matrix go together, so that each one is read once. `lhs` and `rhs` are uint32
// in bounds, of flattened batches; without `lhs` the batch axes of x broadcast with `rhs`. Nothing
// where this library has no kernel.

// b is [e, k, n] of any float type and any strides.
std::optional<mx::array> gathered_product(
    const mx::array& x,
    const mx::array& b,
    const std::optional<mx::array>& lhs,
    const std::optional<mx::array>& rhs,
    mx::Stream stream);

// The matrices are the transposes of w, [e, n, k] in MLX's affine packing; scales and biases are of any float type.
std::optional<mx::array> gathered_quantized_product(
    const mx::array& x,
    const mx::array& w,
    const mx::array& scales,
    const mx::array& biases,
    const std::optional<mx::array>& lhs,
    const std::optional<mx::array>& rhs,
    int group_size,
    int bits,
    mx::Stream stream);

} // namespace executorch_mlx
