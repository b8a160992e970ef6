// Matrix products.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api.h"
#include "elementwise_type.h"
#include "float_type.h"

namespace executorch_mlx::kernel {

// What follows a product while its results are in the cache: y = activation(product) + residual.
struct Epilogue {
  Elementwise activation = Elementwise::copy; // gelu, gelu_tanh, silu, maximum with 0, or copy: none
  const float* residual = nullptr; // [m, n], contiguous, or null
};

// y [m, n] = alpha * x [m, k] @ b [k, n] + beta * c. x and y are contiguous. b is row-major (`b_column_stride` is 1) or
// column-major (`b_row_stride` is 1).
struct Matmul {
  const float* x;
  const float* b;
  int64_t b_row_stride;
  int64_t b_column_stride;
  const float* c; // null if there is none; beta is then not used
  int64_t c_stride; // the distance between the rows of c; 0 if c is a single row, which is added to all rows
  int m;
  int n;
  int k;
  float alpha;
  float beta;
  float* y;
  // Of b.T, from pack_panels(), or null. b is then column-major without gaps. Only matmuls() uses it.
  const float* panels;
  const Epilogue* epilogue = nullptr; // null: none. Only for a column-major b.
};
EXECUTORCH_MLX_KERNEL_API void matmul(const Matmul& matmul);

// `count` products at once, which differ only in b, panels, c, c_stride, n and y. b is column-major, and alpha and beta
// are 1. Each result has the same bits as that of matmul.
EXECUTORCH_MLX_KERNEL_API void matmuls(const Matmul* matmuls, int count);

// Packs the rows of w [n, k], of float32 or bfloat16, for all products with w.T. The products get faster, and keep
// their bits. Writes panels_size() bytes, which should begin at a cache line. This size is 0 if no product uses the
// panels.
EXECUTORCH_MLX_KERNEL_API size_t panels_size(FloatType type, int n, int k);
EXECUTORCH_MLX_KERNEL_API void pack_panels(const void* w, FloatType type, int n, int k, float* panels);

// y [m, n] = x [m, k] @ w.T, where w [n, k] is in MLX's affine packing: w is stored as [n, k * bits / 32],
// scales and biases as [n, k / group_size].
struct QuantizedMatmul {
  const void* x = nullptr;
  const uint32_t* w;
  const void* scales;
  const void* biases;
  FloatType scale_type; // of scales and biases
  int bits;
  int group_size;
  int m = 0;
  int n;
  int k;
  void* y = nullptr;
  FloatType type = FloatType::float32; // of x and y
  // From pack_integer_panels, or null. quantized_matmul ignores it.
  const void* integer_panels = nullptr;
};

// `count` products at once, which differ only in w, scales, biases, scale_type, n and y. Each result has the same bits
// as in a call of its own.
EXECUTORCH_MLX_KERNEL_API void quantized_matmul(const QuantizedMatmul* matmuls, int count);

// y [n, k] = w. Reads the fields of w, and not x and m. y is float32.
EXECUTORCH_MLX_KERNEL_API void dequantize(const QuantizedMatmul& matrix);

// Whether quantized_matmul supports these parameters.
EXECUTORCH_MLX_KERNEL_API bool supports_quantized(int bits, int group_size, int k);

// Like quantized_matmul, but rounds x to 8 bits: each group of a row has a scale of its own. simd/integers.h defines
// the results.
EXECUTORCH_MLX_KERNEL_API void int8_matmul(const QuantizedMatmul* matmuls, int count);

// Like quantized_matmul, for the parameters that int8_matmul supports. Multiplies integers of 24 bits if x is float32,
// with errors about as small as those of float32. Multiplies integers of 16 bits if x is float16 or bfloat16, with
// errors below those of these dtypes. A row that these integers cannot represent is multiplied as quantized_matmul
// does: with an infinity, a NaN, or only tiny values in a group.
EXECUTORCH_MLX_KERNEL_API void integer_matmul(const QuantizedMatmul* matmuls, int count);

// Whether integer_matmul supports these parameters and is faster than quantized_matmul.
EXECUTORCH_MLX_KERNEL_API bool has_fast_integers(int bits, int group_size, int k);

// Packs w, scales and biases for the two functions above, which then need only the panels. The products of few rows
// get faster, and keep their bits. Writes integer_panels_size() bytes, which should begin at a cache line. Other fields
// than w, scales, biases, scale_type, bits, group_size, n and k are not read.
EXECUTORCH_MLX_KERNEL_API void pack_integer_panels(const QuantizedMatmul& matrix, void* panels);
EXECUTORCH_MLX_KERNEL_API size_t integer_panels_size(const QuantizedMatmul& matrix);

// Whether int8_matmul supports these parameters.
EXECUTORCH_MLX_KERNEL_API bool supports_int8(int bits, int group_size, int k);

// y [m, n] = x [m, k] @ w.T, where w [n, k] is float16 or bfloat16.
struct HalfMatmul {
  const void* x;
  const uint16_t* w;
  FloatType type; // of w
  int64_t row_stride; // of w
  int64_t column_stride; // of w
  int m;
  int n;
  int k;
  void* y;
  FloatType x_type;
  FloatType y_type;
  const float* panels; // from pack_panels(), or null. w then has no gaps.
};

// `count` products at once, which differ only in w, panels, n, y and y_type. If there are several, column_stride is 1.
// Each result has the same bits as in a call of its own.
EXECUTORCH_MLX_KERNEL_API void half_matmul(const HalfMatmul* matmuls, int count);

// Returns the number of calls so far of the functions for matrix products and convolutions above. Several products at
// once count as one call.
EXECUTORCH_MLX_KERNEL_API uint64_t product_calls();

} // namespace executorch_mlx::kernel
