// Kernels for an NVIDIA GPU that compute several operations at once.
//
// In a small model, the host needs longer to build and submit the graph of a step than the GPU to compute it, so that fewer
// operations make a step faster. The functions look at the graph that has been built so far. If an operand is the result of
// an operation that the kernel can compute, too, they take the operands of that operation instead, and MLX never evaluates
// it unless something else needs it. Arithmetic is float32, and results of the single operations are rounded to their dtype,
// apart from silu().
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <utility>

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// silu(x) * y, if a or b is the result of silu() that is not evaluated yet, and a and b agree in shape and dtype. If x and y
// are products of the same row vector that are not evaluated yet, the kernel computes these, too.
std::optional<mx::array> multiply_silu(const mx::array& a, const mx::array& b, mx::Stream stream);

// x and rms_norm(x, weight, eps), if x is a sum of two arrays of its shape and dtype that is not evaluated yet.
std::optional<std::pair<mx::array, mx::array>> add_rms_norm(
    const mx::array& x, const mx::array& weight, float eps, mx::Stream stream);

// rope(x) over the whole last axis, not traditional, if x [B, H, S, D] is the transposed result of an RMSNorm that is not
// evaluated yet. `offset` has one element or B.
std::optional<mx::array> rms_norm_rope(
    const mx::array& x, float scale, const mx::array& offset, const mx::array& freqs, mx::Stream stream);

} // namespace executorch_mlx::gpu
