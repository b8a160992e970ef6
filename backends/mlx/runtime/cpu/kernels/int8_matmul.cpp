// Products of activations in 8 bits with quantized weights. simd/int8.h defines the results.
#include <algorithm>

#include "products.h"

namespace executorch_mlx {

namespace {

constexpr int kInt8Padding = 64;  // bytes between two rows, so that the rows do not compete for the same cache lines

} // namespace

} // namespace executorch_mlx

extern "C" bool executorch_mlx_supports_int8(int bits, int group_size, int k) {
  return bits != 2 && executorch_mlx_supports_quantized(bits, group_size, k);
}

extern "C" void executorch_mlx_int8_matmul(const ExecutorchMlxQuantizedMatmul* p) {
  executorch_mlx_int8_matmuls(p, 1);
}

extern "C" void executorch_mlx_int8_matmuls(const ExecutorchMlxQuantizedMatmul* products, int count) {
  using namespace executorch_mlx;
  const auto& p = products[0];
  count_product_call();
  const AsFloats x(p.x, p.type, int64_t{p.m} * p.k);
  const int groups = p.k / p.group_size;
  const ptrdiff_t stride = p.k + kInt8Padding;
  const AlignedFloats integers(stride * p.m / sizeof(float));  // k is a multiple of 4
  const AlignedFloats scales(int64_t{2} * groups * p.m);
  const Int8Rows rows{
      .integers = reinterpret_cast<int8_t*>(integers.get()),
      .stride = stride,
      .scales = scales.get(),
      .sums = scales.get() + int64_t{groups} * p.m,
      .groups = groups};
  parallel_ranges(p.m, p.k, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; ++r) {
      kernels().quantize_row(
          x.get() + r * p.k, matrix_of(p), rows.integers + r * stride, rows.scales + r * groups,
          rows.sums + r * groups);
    }
  });
  const Results y(products, count, [](const auto& product) { return product.type; });
  const int columns = quantized_rows_per_task(p.m, total_columns(products, count));
  for_columns(products, count, columns, [&](int i, int first, int last) {
    kernels().multiply_int8(matrix_of(products[i]), rows, p.m, first, last, y[i], products[i].n);
  });
  y.store();
}
