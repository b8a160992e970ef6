// Products of activations in 8 bits with quantized weights. simd/int8.h defines the results.
#include <algorithm>
#include <cstring>

#include "products.h"

namespace executorch_mlx {

namespace {

using Product = ExecutorchMlxQuantizedMatmul;

constexpr int kInt8Padding = 64;  // bytes between two rows, so that the rows do not compete for the same cache lines

// Describes the panels of the matrix of p, at `data`.
Int8Panels panels_of(const Product& p, const void* data) {
  const int words = p.group_size * p.bits / 32;
  const int groups = p.k / p.group_size;
  const ptrdiff_t group_bytes = kInt8PanelRows * (words * sizeof(uint32_t) + 2 * size_of(p.scale_type));
  return {
      .data = static_cast<const char*>(data),
      .panel_bytes = groups * group_bytes,
      .group_bytes = group_bytes,
      .words = words,
      .groups = groups,
      .bits = p.bits,
      .scale_type = p.scale_type};
}

int number_of_panels(int rows) {
  return (rows + kInt8PanelRows - 1) / kInt8PanelRows;
}

// Writes `count` rows of elements of T, of which each group has `size`, to their places in a panel. `to` is the place of
// the first element.
template <typename T>
void place(const void* rows, int count, int size, const Int8Panels& panels, char* to) {
  const auto* from = static_cast<const T*>(rows);
  for (int r = 0; r < count; ++r) {
    for (int g = 0; g < panels.groups; ++g) {
      auto* group = reinterpret_cast<T*>(to + g * panels.group_bytes) + r;
      for (int i = 0; i < size; ++i) {
        group[i * kInt8PanelRows] = *from++;
      }
    }
  }
}

// Writes the panel of up to kInt8PanelRows rows of the matrix of p, from row `first` on.
void pack_panel(const Product& p, int first, const Int8Panels& panels, char* to) {
  const int rows = std::min(kInt8PanelRows, p.n - first);
  if (rows < kInt8PanelRows) {
    std::memset(to, 0, panels.panel_bytes);
  }
  place<uint32_t>(p.w + int64_t{first} * panels.groups * panels.words, rows, panels.words, panels, to);
  char* scales = to + int64_t{panels.words} * kInt8PanelRows * sizeof(uint32_t);
  for (const void* x : {p.scales, p.biases}) {
    const void* from = at(x, p.scale_type, int64_t{first} * panels.groups);
    p.scale_type == FloatType::float32 ? place<uint32_t>(from, rows, 1, panels, scales)
                                       : place<uint16_t>(from, rows, 1, panels, scales);
    scales += kInt8PanelRows * size_of(p.scale_type);
  }
}

// Computes columns [first, last) of a product.
void multiply(const Product& p, const Int8Rows& x, int first, int last, float* y) {
  if (p.int8_panels != nullptr) {
    return kernels().multiply_int8(panels_of(p, p.int8_panels), x, p.m, first, last, y, p.n);
  }
  const auto bytes = panels_of(p, nullptr).panel_bytes;
  const AlignedFloats buffer(bytes * number_of_panels(last - first) / sizeof(float));
  const auto panels = panels_of(p, buffer.get());
  auto* to = static_cast<char*>(static_cast<void*>(buffer.get()));
  for (int row = first; row < last; row += kInt8PanelRows, to += bytes) {
    pack_panel(p, row, panels, to);
  }
  kernels().multiply_int8(panels, x, p.m, 0, last - first, y + first, p.n);
}

} // namespace

} // namespace executorch_mlx

extern "C" bool executorch_mlx_supports_int8(int bits, int group_size, int k) {
  return bits != 2 && executorch_mlx_supports_quantized(bits, group_size, k);
}

extern "C" size_t executorch_mlx_int8_panels_size(const ExecutorchMlxQuantizedMatmul* matrix) {
  using namespace executorch_mlx;
  return panels_of(*matrix, nullptr).panel_bytes * number_of_panels(matrix->n);
}

extern "C" void executorch_mlx_pack_int8(const ExecutorchMlxQuantizedMatmul* matrix, void* to) {
  using namespace executorch_mlx;
  const auto panels = panels_of(*matrix, to);
  parallel(number_of_panels(matrix->n), [&](int i) {
    pack_panel(*matrix, i * kInt8PanelRows, panels, static_cast<char*>(to) + i * panels.panel_bytes);
  });
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
    multiply(products[i], rows, first, last, y[i]);
  });
  y.store();
}
