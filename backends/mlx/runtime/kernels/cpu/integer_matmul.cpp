// Products of activations as integers with quantized weights. simd/integers.h defines the results.
#include <algorithm>
#include <cstring>

#include "products.h"

namespace executorch_mlx {

namespace {

using Product = kernel::QuantizedMatmul;

constexpr int kIntegerPadding = 64; // bytes between two rows, so that the rows do not compete for the same cache lines

// Describes the panels of the matrix of p, at `data`.
IntegerPanels panels_of(const Product& p, const void* data) {
  const int words = p.group_size * p.bits / 32;
  const int groups = p.k / p.group_size;
  const ptrdiff_t group_bytes = kIntegerPanelRows * (words * sizeof(uint32_t) + 2 * size_of(p.scale_type));
  return {.data = static_cast<const char*>(data),
      .panel_bytes = groups * group_bytes,
      .group_bytes = group_bytes,
      .words = words,
      .groups = groups,
      .bits = p.bits,
      .scale_type = p.scale_type};
}

int number_of_panels(int rows) { return (rows + kIntegerPanelRows - 1) / kIntegerPanelRows; }

// Writes the scales or biases of `count` rows to their places in a panel. `to` is the place of the first one.
template <typename T>
void place(const void* scales, int count, const IntegerPanels& panels, char* to) {
  const auto* from = static_cast<const T*>(scales);
  for (int r = 0; r < count; ++r) {
    for (int g = 0; g < panels.groups; ++g) {
      reinterpret_cast<T*>(to + g * panels.group_bytes)[r] = *from++;
    }
  }
}

// Writes the panel of up to kIntegerPanelRows rows of the matrix of p, from row `first` on.
void pack_panel(const Product& p, int first, const IntegerPanels& panels, char* to) {
  const int rows = std::min(kIntegerPanelRows, p.n - first);
  if (rows < kIntegerPanelRows) {
    std::memset(to, 0, panels.panel_bytes);
  }
  const ptrdiff_t row_words = ptrdiff_t{panels.groups} * panels.words;
  for (int g = 0; g < panels.groups; ++g) {
    kernels().transpose_rows(p.w + first * row_words + g * panels.words, FloatType::float32, row_words, rows,
        panels.words, reinterpret_cast<float*>(to + g * panels.group_bytes), kIntegerPanelRows);
  }
  char* scales = to + int64_t{panels.words} * kIntegerPanelRows * sizeof(uint32_t);
  for (const void* x : {p.scales, p.biases}) {
    const void* from = at(x, p.scale_type, int64_t{first} * panels.groups);
    p.scale_type == FloatType::float32 ? place<uint32_t>(from, rows, panels, scales)
                                       : place<uint16_t>(from, rows, panels, scales);
    scales += kIntegerPanelRows * size_of(p.scale_type);
  }
}

// Computes columns [first, last) of a product.
void multiply(const Product& p, const IntegerRows& x, int first, int last, float* y) {
  if (p.integer_panels != nullptr) {
    return kernels().multiply_integers(panels_of(p, p.integer_panels), x, p.m, first, last, y, p.n);
  }
  const auto bytes = panels_of(p, nullptr).panel_bytes;
  const AlignedFloats buffer(bytes * number_of_panels(last - first) / sizeof(float));
  const auto panels = panels_of(p, buffer.get());
  auto* to = static_cast<char*>(static_cast<void*>(buffer.get()));
  for (int row = first; row < last; row += kIntegerPanelRows, to += bytes) {
    pack_panel(p, row, panels, to);
  }
  kernels().multiply_integers(panels, x, p.m, 0, last - first, y + first, p.n);
}

// Rows of activations as integers, in memory of their own.
class RoundedRows {
 public:
  // Rounds the rows x [m, k] of a product.
  RoundedRows(const Product& p, int digits, const float* x)
      : stride_(int64_t{p.k} * kernels().bytes_of_integer(p.bits) + kIntegerPadding),
        integers_(stride_ * digits * p.m / sizeof(float)), // k is a multiple of 4
        scales_(int64_t{2} * (p.k / p.group_size) * p.m),
        fits_(p.m) {
    const int groups = p.k / p.group_size;
    rows_ = {.integers = reinterpret_cast<int8_t*>(integers_.get()),
        .stride = stride_,
        .scales = scales_.get(),
        .sums = scales_.get() + int64_t{groups} * p.m,
        .groups = groups,
        .digits = digits};
    parallel_ranges(p.m, p.k, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) {
        fits_[r] = kernels().round_row(x + r * p.k, matrix_of(p), rows_, r);
      }
    });
  }

  const IntegerRows& get() const { return rows_; }

  // Whether the integers represent all groups of a row.
  bool fits(int row) const { return fits_[row]; }

 private:
  int64_t stride_; // in bytes
  AlignedFloats integers_;
  AlignedFloats scales_;
  std::vector<char> fits_;
  IntegerRows rows_;
};

// Computes `count` products at once, with integers of this many digits.
void multiply_rounded(const Product* products, int count, int digits) {
  const auto& p = products[0];
  count_product_call();
  const AsFloats x(p.x, p.type, int64_t{p.m} * p.k);
  const RoundedRows rows(p, digits, x.get());
  const Results y(products, count, [](const auto& product) { return product.type; });
  const int columns = quantized_rows_per_task(p.m, total_columns(products, count));
  for_columns(products, count, columns,
      [&](int i, int first, int last) { multiply(products[i], rows.get(), first, last, y[i]); });
  for (int r = 0; digits > 1 && r < p.m; ++r) {
    if (!rows.fits(r)) {
      multiply_few_rows(
          products, count, 1, x.get() + int64_t{r} * p.k, [&](int i) { return y[i] + int64_t{r} * products[i].n; });
    }
  }
  y.store();
}

} // namespace

bool kernel::supports_int8(int bits, int group_size, int k) {
  return bits != 2 && supports_quantized(bits, group_size, k);
}

size_t kernel::integer_panels_size(const QuantizedMatmul& matrix) {
  return panels_of(matrix, nullptr).panel_bytes * number_of_panels(matrix.n);
}

void kernel::pack_integer_panels(const QuantizedMatmul& matrix, void* to) {
  const auto panels = panels_of(matrix, to);
  parallel(number_of_panels(matrix.n), [&](int i) {
    pack_panel(matrix, i * kIntegerPanelRows, panels, static_cast<char*>(to) + i * panels.panel_bytes);
  });
}

void kernel::int8_matmul(const QuantizedMatmul* products, int count) { multiply_rounded(products, count, 1); }

bool kernel::has_fast_integers(int bits, int group_size, int k) {
  return kernels().has_fast_integers && supports_int8(bits, group_size, k);
}

void kernel::integer_matmul(const QuantizedMatmul* products, int count) {
  multiply_rounded(products, count, products[0].type == FloatType::float32 ? 3 : 2);
}

} // namespace executorch_mlx
