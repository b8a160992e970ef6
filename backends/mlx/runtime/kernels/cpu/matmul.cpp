// Products of x with weights that are not float32. If x has few rows, a kernel converts the weights to float32 in
// registers. If x has more rows, the weights are converted to float32 while they are packed in panels. Products of
// bfloat16 with bfloat16 need no conversion if the processor has an instruction for them, for vectors or for tiles.
#include <algorithm>
#include <atomic>

#include "products.h"

namespace executorch_mlx {

namespace {

std::atomic<uint64_t> calls{0};

} // namespace

void multiply_few_rows(
    const kernel::QuantizedMatmul* products, int count, int m, const float* x, const std::function<float*(int)>& y) {
  const auto& simd = kernels();
  const int k = products[0].k;
  const int64_t stride = k + kPadding;
  const AlignedFloats arranged(stride * m);
  for (int64_t r = 0; r < m; ++r) {
    simd.arrange_for_quantized(x + r * k, matrix_of(products[0]), arranged.get() + r * stride);
  }
  const int tiles = (m + kMaxQuantizedRows - 1) / kMaxQuantizedRows;
  const int size = quantized_rows_per_task(m, total_columns(products, count));
  for_columns(products, count, size, [&](int i, int first, int last) {
    const auto w = matrix_of(products[i]);
    const int n = products[i].n;
    for (int tile = 0; tile < tiles; ++tile) {
      const int64_t row = m * tile / tiles;
      const int rows = static_cast<int>(m * (tile + 1) / tiles - row);
      simd.quantized_rows(w, arranged.get() + row * stride, stride, rows, first, last, y(i) + row * n, n);
    }
  });
}

namespace {

// The product of many rows x, given in float32.
void multiply_many_quantized_rows(const kernel::QuantizedMatmul& p, const float* x, float* y) {
  const Operands operands{.x = x, .ldx = p.k, .y = y, .ldy = p.n, .m = p.m, .n = p.n, .k = p.k};
  const auto pack = [&](int, int first, int count, float* panel) {
    kernels().pack_quantized_panel(matrix_of(p), first, count, panel);
  };
  multiply_many_rows(&operands, 1, FloatType::float32, pack, [](int, int, int) { return Bytes{}; });
}

// A product with a matrix whose rows have gaps between their elements.
void multiply_strided_halves(const kernel::HalfMatmul& p) {
  const AsFloats x(p.x, p.x_type, int64_t{p.m} * p.k);
  const Operands operands{
      .x = x.get(), .ldx = p.k, .y = p.y, .ldy = p.n, .m = p.m, .n = p.n, .k = p.k, .y_type = p.y_type};
  const auto pack = [&](int, int first, int count, float* panel) {
    pack_halves(p.w + first * p.row_stride, p.type, p.row_stride, p.column_stride, count, p.k, panel);
  };
  multiply_many_rows(&operands, 1, FloatType::float32, pack, [](int, int, int) { return Bytes{}; });
}

// Computes products of bfloat16 pairs in tiles.
void multiply_in_tiles(const std::vector<RowProduct>& products) {
  const auto& p = products[0];
  const PairTiles x(p.x, p.ldx, p.m, p.k);
  constexpr int kSmallest = 64; // columns of a task
  constexpr int kRowBlock = 128; // rows of x whose results stay in the cache
  const int count = static_cast<int>(products.size());
  const int share = total_columns(products.data(), count) / (4 * kernel::threads()) / kSmallest * kSmallest;
  const int most = p.m > kTileRows ? 2 * kSmallest : 16 * kSmallest;
  for_columns(products.data(), count, std::clamp(share, kSmallest, most), [&](int i, int first, int last) {
    const auto& product = products[i];
    const auto* w = static_cast<const uint16_t*>(at(product.w, FloatType::bfloat16_pair, first * product.ldw));
    for (int row = 0; row < p.m; row += kRowBlock) {
      const int rows = std::min(kRowBlock, p.m - row);
      compute_block(product, row, rows, first, last - first, [&](float* y, int64_t ldy) {
        kernels().multiply_tiles(x.from_row(row), rows, w, 2 * product.ldw, last - first, 2 * p.k, y, ldy);
      });
    }
  });
}

} // namespace

void count_product_call() { calls.fetch_add(1, std::memory_order_relaxed); }

uint64_t kernel::product_calls() { return calls.load(std::memory_order_relaxed); }

bool kernel::supports_quantized(int bits, int group_size, int k) {
  return (bits == 2 || bits == 4 || bits == 8) && (group_size == 32 || group_size == 64 || group_size == 128) &&
      k % group_size == 0 && k / group_size <= kMaxGroups;
}

void kernel::quantized_matmul(const QuantizedMatmul* products, int count) {
  const auto& p = products[0];
  count_product_call();
  const AsFloats x(p.x, p.type, int64_t{p.m} * p.k);
  const Results y(products, count, [](const auto& product) { return product.type; });
  if (p.m < kManyQuantizedRows) {
    multiply_few_rows(products, count, p.m, x.get(), [&](int i) { return y[i]; });
  } else {
    for (int i = 0; i < count; ++i) {
      multiply_many_quantized_rows(products[i], x.get(), y[i]);
    }
  }
  y.store();
}

void kernel::dequantize(const QuantizedMatmul& p) {
  parallel_ranges(p.n, p.k, [&](int64_t first, int64_t last) {
    kernels().dequantize_rows(
        matrix_of(p), static_cast<int>(first), static_cast<int>(last), static_cast<float*>(p.y) + first * p.k, p.k);
  });
}

void kernel::half_matmul(const HalfMatmul* products, int count) {
  const auto& p = products[0];
  count_product_call();
  if (p.column_stride != 1) {
    return multiply_strided_halves(p);
  }
  const bool in_pairs = p.x_type == FloatType::bfloat16 && multiplies_in_pairs(p.type, p.k) && p.row_stride % 2 == 0;
  const AsFloats x(p.x, in_pairs ? FloatType::float32 : p.x_type, int64_t{p.m} * p.k);
  const int width = in_pairs ? 2 : 1;
  std::vector<RowProduct> rows;
  for (int i = 0; i < count; ++i) {
    const auto& product = products[i];
    rows.push_back({{.x = x.get(),
                        .ldx = p.k / width,
                        .y = product.y,
                        .ldy = product.n,
                        .m = p.m,
                        .n = product.n,
                        .k = p.k / width,
                        .y_type = product.y_type,
                        .panels = in_pairs ? product.panels : nullptr},
        product.w, product.row_stride / width});
  }
  if (in_pairs && kernels().multiply_tiles != nullptr) {
    return multiply_in_tiles(rows);
  }
  multiply_rows_together(rows, in_pairs ? FloatType::bfloat16_pair : p.type);
}

} // namespace executorch_mlx
