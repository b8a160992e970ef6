// Inner loops over one thread's share, compiled once for each instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace executorch_mlx {

enum class FloatType : int { float32, float16, bfloat16 };

// An [n, k] matrix in MLX's affine packing, and rows to multiply with it.
struct QuantizedRows {
  const uint32_t* w;    // [n, k * bits / 32]
  const void* scales;   // [n, k / group_size]
  const void* biases;   // the same
  FloatType scale_type;
  int bits;             // 2, 4 or 8
  int group_size;       // 32, 64 or 128
  int k;
};

struct Kernels {
  // y[r * ldy + j] = alpha * sum over i of x[r * ldx + i] * w[j * ldw + i], and beta times what
  // was there, for m rows of x (1 to kMostRows) and n rows of w, which are of `type`.
  void (*dot_rows)(
      const float* x, ptrdiff_t ldx, int m, const void* w, FloatType type, ptrdiff_t ldw, int n, int k, float alpha,
      float beta, float* y, ptrdiff_t ldy);
  // A row of x [k] in the order that quantized_rows reads it, and the sums of its groups.
  void (*arrange)(const float* x, const QuantizedRows& q, float* arranged, float* sums);
  // Elements of `arranged` for one row.
  size_t (*arranged_size)(const QuantizedRows& q);
  // y[r * ldy + j] for rows j = first to last of the matrix and m rows (1 to kMostRows) of x.
  void (*quantized_rows)(
      const QuantizedRows& q, const float* arranged, const float* sums, int m, int first, int last, float* y,
      ptrdiff_t ldy);
  // Rows first to last of the matrix as they are, `ldo` apart.
  void (*dequantize_rows)(const QuantizedRows& q, int first, int last, float* out, ptrdiff_t ldo);
  // y = x, float16 or bfloat16 numbers that are `step` apart.
  void (*widen)(const uint16_t* x, FloatType type, ptrdiff_t step, float* y, ptrdiff_t count);
  // y = x / (1 + exp(-x)).
  void (*silu)(const float* x, float* y, ptrdiff_t count);
  // x = exp(x - the highest of x). Returns their sum.
  float (*exponentials)(float* x, ptrdiff_t count);
  // Rows of x over the root of the mean of their squares and eps, times weight, which may be null.
  void (*rms_norm)(const float* x, const float* weight, float* y, ptrdiff_t rows, ptrdiff_t width, float eps);
  // Turns the pairs (x[i], x[half + i]) of a row by the angles of these cosines and sines.
  void (*rotate)(const float* x, const float* cosines, const float* sines, float* y, ptrdiff_t half);
};

constexpr int kMostRows = 4;

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

// The best of them that this processor runs.
const Kernels& kernels();

} // namespace executorch_mlx
