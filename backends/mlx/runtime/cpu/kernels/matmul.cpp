// Products of x with weights that are not float32. If x has few rows, a kernel converts the weights to float32 in
// registers. If x has more rows, rows of weights are converted to float32 in memory. Products of bfloat16 with bfloat16
// need no conversion if the processor has an instruction for them.
#include <algorithm>

#include "products.h"

namespace executorch_mlx {

namespace {

// Computes the product p, in which x has few rows. `w` describes the matrix of p. x and y are those of p in float32.
void multiply_few_rows(const ExecutorchMlxQuantizedMatmul& p, const QuantizedMatrix& w, const float* x, float* y) {
  const auto& simd = kernels();
  const int64_t stride = p.k + kPadding;
  const AlignedFloats arranged(stride * p.m);
  for (int64_t r = 0; r < p.m; ++r) {
    simd.arrange(x + r * p.k, w, arranged.get() + r * stride);
  }
  const int tiles = (p.m + kMaxQuantizedRows - 1) / kMaxQuantizedRows;
  const int size = quantized_rows_per_task(p.m, p.n);
  parallel((p.n + size - 1) / size, [&](int i) {
    const int first = i * size;
    const int last = std::min(p.n, first + size);
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t row = p.m * tile / tiles;
      const int rows = static_cast<int>(p.m * (tile + 1) / tiles - row);
      simd.quantized_rows(w, arranged.get() + row * stride, stride, rows, first, last, y + row * p.n, p.n);
    }
  });
}

} // namespace

} // namespace executorch_mlx

extern "C" bool executorch_mlx_supports_quantized(int bits, int group_size, int k) {
  return (bits == 2 || bits == 4 || bits == 8) && (group_size == 32 || group_size == 64 || group_size == 128) &&
      k % group_size == 0 && k / group_size <= executorch_mlx::kMaxGroups;
}

extern "C" void executorch_mlx_quantized_matmul(const ExecutorchMlxQuantizedMatmul* p) {
  using namespace executorch_mlx;
  const QuantizedMatrix w{p->w, p->scales, p->biases, p->scale_type, p->bits, p->group_size, p->k};
  const AsFloats x(p->x, p->type, int64_t{p->m} * p->k);
  compute_as(p->y, p->type, int64_t{p->m} * p->n, [&](float* y) {
    if (p->m < kManyQuantizedRows) {
      return multiply_few_rows(*p, w, x.get(), y);
    }
    const Operands operands{.x = x.get(), .ldx = p->k, .y = y, .ldy = p->n, .m = p->m, .n = p->n, .k = p->k};
    multiply_many_rows(operands, FloatType::float32, [&](int first, int count, float* to, int64_t& stride) {
      kernels().dequantize_rows(w, first, first + count, to, stride);
      return static_cast<const float*>(to);
    });
  });
}

extern "C" void executorch_mlx_half_matmul(const ExecutorchMlxHalfMatmul* p) {
  using namespace executorch_mlx;
  Operands operands{.x = nullptr, .ldx = p->k, .y = nullptr, .ldy = p->n, .m = p->m, .n = p->n, .k = p->k};
  const bool in_pairs = kernels().multiplies_pairs && p->x_type == FloatType::bfloat16 &&
      p->type == FloatType::bfloat16 && p->column_stride == 1 && p->k % 2 == 0 && p->row_stride % 2 == 0;
  if (in_pairs) {
    operands.x = static_cast<const float*>(p->x);
    operands.ldx = operands.k = p->k / 2;
    return compute_as(p->y, p->y_type, int64_t{p->m} * p->n, [&](float* y) {
      operands.y = y;
      multiply_rows(operands, p->w, FloatType::bfloat16_pair, p->row_stride / 2);
    });
  }
  const AsFloats x(p->x, p->x_type, int64_t{p->m} * p->k);
  operands.x = x.get();
  compute_as(p->y, p->y_type, int64_t{p->m} * p->n, [&](float* y) {
    operands.y = y;
    if (p->column_stride == 1) {
      return multiply_rows(operands, p->w, p->type, p->row_stride);
    }
    multiply_many_rows(operands, FloatType::float32, [&](int first, int count, float* to, int64_t& stride) {
      for (int64_t r = 0; r < count; ++r) {
        kernels().widen(p->w + (first + r) * p->row_stride, p->type, p->column_stride, to + r * stride, p->k);
      }
      return static_cast<const float*>(to);
    });
  });
}
