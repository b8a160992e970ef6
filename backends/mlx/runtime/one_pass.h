#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// What MLX's CPU backend puts together of several primitives, as one: for float32 on a CPU stream,
// where this library has kernels; nothing otherwise.

std::optional<mx::array> silu_in_one_pass(const mx::array& x, mx::Stream stream);

// weight: float32 of the width of x.
std::optional<mx::array> rms_norm_in_one_pass(
    const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::Stream stream);

// x [B, H, T, D]; offset: int32, one or B of them; freqs, as MLX has them: float32 [dims / 2].
std::optional<mx::array> rope_in_one_pass(
    const mx::array& x,
    int dims,
    float base,
    float scale,
    const mx::array& offset,
    const std::optional<mx::array>& freqs,
    mx::Stream stream);

// q [B, H, T, D], k [B, G, S, D] and v [B, G, S, V], where H is a multiple of G; `mask`, bool or float32,
// broadcasts to [B, H, T, S]. As mx::fast::scaled_dot_product_attention, which see.
std::optional<mx::array> attention_in_one_pass(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    const std::optional<mx::array>& mask,
    mx::Stream stream);

} // namespace executorch_mlx
