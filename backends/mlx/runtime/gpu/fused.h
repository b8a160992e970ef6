// Kernels for GPUs that compute several operations at once: for NVIDIA GPUs, and some of them for Apple GPUs.
//
// In a small model, the host needs longer to build and submit the graph of a step than the GPU to compute it. Fewer
// operations therefore make a step faster. The kernels for one token also form sequences: see sequence_kernel.h.
//
// norm_rope() and the functions of attention look at the lazy graph of their operands. If an operand is the result of
// an operation that the kernel can also compute, the kernel takes the operands of this operation instead. MLX then
// evaluates the operation itself only if something else needs its result. For all other functions, fusion/ finds the
// operations when the program is loaded.
//
// Arithmetic is float32. As in separate operations, the result of each operation is rounded to its dtype, except the
// sigmoid inside silu().
//
// All functions return nullopt if their condition does not hold, the GPU of the stream does not use the kernel (see
// verdicts.h), or the kernel does not support the shapes or dtypes.
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <utility>
#include <vector>

#include "../span.h"

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// silu(gate) * up, if both have the same shape and dtype.
std::optional<mx::array> silu_product(const mx::array& gate, const mx::array& up, mx::Stream stream);

// a + b and rms_norm(a + b, weight, eps), if all have the same dtype, and a and b the same shape.
std::optional<std::pair<mx::array, mx::array>> add_rms_norm(
    const mx::array& a, const mx::array& b, const mx::array& weight, float eps, mx::Stream stream);

// rms_norm(x, weight, eps), if the weight has the dtype of x. norm_rope() takes over this operation.
std::optional<mx::array> rms_norm(const mx::array& x, const mx::array& weight, float eps, mx::Stream stream);

// rope(x) for each of one or two arrays x [B, H, S, D], over the whole last axis, not traditional. Each x must be
// transposed from [B, S, H, D] and lazy. Both or none may be results of an RMSNorm before that; a single one must be,
// unless S is 1. `offset` has one element or B.
std::optional<std::vector<mx::array>> norm_rope(const std::vector<mx::array>& arrays, float scale,
    const mx::array& offset, const mx::array& freqs, mx::Stream stream);

// A KV cache [B, heads, capacity, D] with update[:, :, i] at positions[i], for each i in this order. Nothing else may
// refer to the cache or its memory until the result is evaluated, because a kernel writes to this memory.
std::optional<mx::array> update_positions(
    const mx::array& cache, const mx::array& update, const std::vector<int>& positions, mx::Stream stream);

// Prepares arrays for their evaluation: the lazy updates that a kernel has taken over wait for all of its sequence, so
// that MLX does not evaluate a part of the sequence first. See sequence_kernel.h.
void join_sequences(const std::vector<mx::array>& arrays);

// Attention of q [B, H, 1, D] to k and v [B, KV heads, positions, D], which are lazy slices of consecutive positions of
// a KV cache. The kernel also computes norm_rope() and update_positions() if q is a lazy result of norm_rope(), and the
// last position of k and v is a lazy update, that of k with another result of norm_rope().
std::optional<mx::array> attention_of_token(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, mx::Stream stream);

// Attention of q [1, H, N, D], one query for each of N spans of positions, to these positions of the KV caches k and v
// [1, KV heads, capacity, D]. The kernel computes the same operations as that of attention_of_token(). The result for a
// span does not depend on the other spans.
std::optional<mx::array> attention_of_rows(const mx::array& q, const mx::array& k, const mx::array& v, float scale,
    const std::vector<Span>& spans, mx::Stream stream);

// Row vectors x [..., depth]: up to eight, or up to 32 in half precision. With a norm, the kernels multiply
// rms_norm(x, norm, eps).
struct Vectors {
  mx::array x;
  std::optional<mx::array> norm = std::nullopt; // the weight, of the dtype of x
  float eps = 0.0f;
};

// A matrix [n, depth]: numbers of the dtype of the vectors, or, with scales and biases, integers of `bits` bits in
// MLX's affine format.
struct Matrix {
  Matrix(mx::array w) : w(std::move(w)) {}
  Matrix(mx::array w, mx::array scales, mx::array biases, int group_size, int bits)
      : w(std::move(w)), scales(std::move(scales)), biases(std::move(biases)), group_size(group_size), bits(bits) {}

  mx::array w;
  std::optional<mx::array> scales, biases;
  int group_size = 0, bits = 0;
};

// Whether the kernels can multiply the vectors by matrices, of which there is at least one: these are available and
// row-major, and quantized alike or not at all. For quantized matrices, an NVIDIA GPU has kernels in half precision. An
// Apple GPU has kernels for one vector only.
bool can_multiply(const Vectors& vectors, const std::vector<Matrix>& matrices, mx::Stream stream);

// x @ w.T for each of one to four matrices w.
std::optional<std::vector<mx::array>> products_of_row(
    const Vectors& vectors, const std::vector<Matrix>& matrices, mx::Stream stream);

// silu(x @ gate.T) * (x @ up.T)
std::optional<mx::array> gated_products(
    const Vectors& vectors, const Matrix& gate, const Matrix& up, mx::Stream stream);

// The numbers of a quantized matrix, of the dtype of its scales, which is one of half precision.
std::optional<mx::array> dequantize(const Matrix& matrix, mx::Stream stream);

// x @ w.T for many vectors x [..., depth] and a quantized matrix w that is available and row-major. The numbers of w
// are in memory that all these products of a stream share.
std::optional<mx::array> dequantized_product(const mx::array& x, const Matrix& matrix, mx::Stream stream);

// x @ w.T + added
std::optional<mx::array> product_and_sum(
    const Vectors& vectors, const Matrix& w, const mx::array& added, mx::Stream stream);

// Rows of a table, which may be quantized: [indices..., depth]. Indices out of bounds are limited as bounded_indices()
// does.
std::optional<mx::array> embedding(const Matrix& table, const mx::array& indices, mx::Stream stream);

} // namespace executorch_mlx::gpu
