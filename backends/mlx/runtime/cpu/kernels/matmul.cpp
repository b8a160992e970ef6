// Products of x with weights that are not float32. If x has few rows, a kernel converts the weights to float32 in
// registers. If x has more rows, rows of weights are converted to float32 in memory.
#include <algorithm>

#include "products.h"

namespace executorch_mlx {

namespace {

constexpr int kRowsPerTask = 64;  // rows of w

// Computes the product p, in which x has few rows. `w` describes the matrix of p.
void multiply_few_rows(const ExecutorchMlxQuantizedMatmul& p, const QuantizedMatrix& w) {
  const auto& simd = kernels();
  const int64_t stride = p.k + kPadding;
  const AlignedFloats arranged(stride * p.m);
  for (int64_t r = 0; r < p.m; ++r) {
    simd.arrange(p.x + r * p.k, w, arranged.get() + r * stride);
  }
  const int tiles = (p.m + kMaxQuantizedRows - 1) / kMaxQuantizedRows;
  parallel((p.n + kRowsPerTask - 1) / kRowsPerTask, [&](int i) {
    const int first = i * kRowsPerTask;
    const int last = std::min(p.n, first + kRowsPerTask);
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t row = p.m * tile / tiles;
      const int rows = static_cast<int>(p.m * (tile + 1) / tiles - row);
      simd.quantized_rows(w, arranged.get() + row * stride, stride, rows, first, last, p.y + row * p.n, p.n);
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
  if (p->m < kManyQuantizedRows) {
    return multiply_few_rows(*p, w);
  }
  const Operands operands{.x = p->x, .ldx = p->k, .y = p->y, .ldy = p->n, .m = p->m, .n = p->n, .k = p->k};
  multiply_many_rows(operands, [&](int first, int count, float* to, int64_t& stride) {
    kernels().dequantize_rows(w, first, first + count, to, stride);
    return static_cast<const float*>(to);
  });
}

extern "C" void executorch_mlx_half_matmul(const ExecutorchMlxHalfMatmul* p) {
  using namespace executorch_mlx;
  const Operands operands{.x = p->x, .ldx = p->k, .y = p->y, .ldy = p->n, .m = p->m, .n = p->n, .k = p->k};
  if (p->column_stride == 1) {
    return multiply_rows(operands, p->w, p->type, p->row_stride);
  }
  multiply_many_rows(operands, [&](int first, int count, float* to, int64_t& stride) {
    for (int64_t r = 0; r < count; ++r) {
      kernels().widen(p->w + (first + r) * p->row_stride, p->type, p->column_stride, to + r * stride, p->k);
    }
    return static_cast<const float*>(to);
  });
}
