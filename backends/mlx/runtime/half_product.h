#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// float32 [..., n] = x, float32 [..., k], times b [k, n] of float16 or bfloat16, of any strides. On a CPU
// stream, where MLX has one thread and no good kernel for half precision; nothing where this library has
// no kernel either.
std::optional<mx::array> half_product(const mx::array& x, const mx::array& b, mx::Stream stream);

} // namespace executorch_mlx
