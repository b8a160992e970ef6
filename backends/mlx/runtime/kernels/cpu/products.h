// Matrix products in which each result depends only on its row of x and its row or column of the matrix: not on the
// number of rows, their positions, or the number of threads. ../README.md states the order of summation.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "conversion.h"
#include "matmul.h"

namespace executorch_mlx {

// x [m, k] and y [m, n] of a product y = x @ w.T. ldx and ldy are the distances between rows. y has elements of y_type:
// always float32 with multiply_columns() and multiply_float_rows(). These two compute alpha * x @ w.T + beta * y, and
// add the rows of `addend`, with the distance ld_addend, unless it is null; in multiply_columns(), alpha is then 1 and
// beta is 0.
struct Operands {
  const float* x;
  int64_t ldx;
  void* y;
  int64_t ldy;
  int m;
  int n;
  int k;
  float alpha = 1;
  float beta = 0;
  const float* addend = nullptr;
  int64_t ld_addend = 0;
  FloatType y_type = FloatType::float32;
  const float* panels = nullptr; // the rows of w in consecutive panels, or null
  // Of multiply_float_rows(): see FloatResults.
  Elementwise activation = Elementwise::copy;
  const float* residual = nullptr;

  float* float_y() const { return static_cast<float*>(y); }
};

// Calls compute(y, ldy), which writes `rows` rows of `columns` float32 results with the distance ldy between rows, and
// stores them as the block of p.y that begins at (row, column).
template <typename Compute>
void compute_block(const Operands& p, int row, int rows, int column, int columns, Compute&& compute) {
  const int64_t offset = row * p.ldy + column;
  if (p.y_type == FloatType::float32) {
    return compute(p.float_y() + offset, p.ldy);
  }
  const AlignedFloats results(int64_t{rows} * columns);
  compute(results.get(), columns);
  for (int64_t r = 0; r < rows; ++r) {
    kernels().narrow(results.get() + r * columns, p.y_type, static_cast<uint16_t*>(p.y) + offset + r * p.ldy, columns);
  }
}

// Rows of a product from which on panels are faster than quantized_rows. Below, packing w takes too long.
constexpr int kManyQuantizedRows = 64;

// Floats between the copied rows of x. If the distance between rows were a power of two, the rows would compete for the
// same cache lines.
constexpr int kPadding = 16;

// The number of rows of quantized weights in a task, of n rows, for `m` rows of x. Few rows of x read the weights from
// memory: a task then prefetches ahead, which is in vain at its end, so it should be large.
inline int quantized_rows_per_task(int m, int n) {
  constexpr int kSmallest = 64;
  constexpr int kLargest = 512;
  constexpr int kFewRows = 8;
  const int share = n / (2 * kernel::threads()) / kSmallest * kSmallest;
  return m > kFewRows ? kSmallest : std::clamp(share, kSmallest, kLargest);
}

// Counts a call for kernel::product_calls().
void count_product_call();

// Whether products of bfloat16 x with weights of this type, with k columns, multiply pairs.
inline bool multiplies_in_pairs(FloatType type, int k) {
  return kernels().multiplies_bfloat16_pairs && type == FloatType::bfloat16 && k % 2 == 0;
}

inline QuantizedMatrix matrix_of(const kernel::QuantizedMatmul& p) {
  return {p.w, p.scales, p.biases, p.scale_type, p.bits, p.group_size, p.k};
}

// Columns first ... last - 1 of a product.
struct ColumnPart {
  int product;
  int first;
  int last;
};

// The number of panels of this many rows.
inline int panels_of(int rows) { return (rows + kernels().panel_rows - 1) / kernels().panel_rows; }

// Divides the columns of all products into parts of at most `size` columns.
template <typename Product>
std::vector<ColumnPart> column_parts(const Product* products, int count, int size) {
  std::vector<ColumnPart> parts;
  for (int i = 0; i < count; ++i) {
    for (int first = 0; first < products[i].n; first += size) {
      parts.push_back({i, first, std::min(products[i].n, first + size)});
    }
  }
  return parts;
}

// Divides the columns of all products into parts of at most kPanelsTogether panels. Rather than with a part of a single
// panel, which takes longer for each column, a product ends with two parts that lack one panel in all.
template <typename Product>
std::vector<ColumnPart> panel_parts(const Product* products, int count) {
  std::vector<ColumnPart> parts;
  for (int i = 0; i < count; ++i) {
    const int n = products[i].n;
    for (int first = 0; first < n;) {
      const int panels = panels_of(n - first) == kPanelsTogether + 1 ? kPanelsTogether - 1 : kPanelsTogether;
      const int last = std::min(n, first + kernels().panel_rows * panels);
      parts.push_back({i, first, last});
      first = last;
    }
  }
  return parts;
}

// Calls run(i, first, last) for parts of at most `size` columns [first, last) of each product i, in parallel.
template <typename Product, typename Run>
void for_columns(const Product* products, int count, int size, Run&& run) {
  const auto parts = column_parts(products, count, size);
  parallel(static_cast<int>(parts.size()), [&](int i) { run(parts[i].product, parts[i].first, parts[i].last); });
}

// The columns of all products together.
template <typename Product>
int total_columns(const Product* products, int count) {
  int columns = 0;
  for (int i = 0; i < count; ++i) {
    columns += products[i].n;
  }
  return columns;
}

// The results of several products in float32. store() writes them to the y of the products, with elements of
// type_of(product).
template <typename Product, typename TypeOf>
class Results {
 public:
  Results(const Product* products, int count, TypeOf type_of) : products_(products), type_of_(type_of) {
    for (int i = 0; i < count; ++i) {
      const bool is_float = type_of(products[i]) == FloatType::float32;
      converted_.push_back(is_float ? AlignedFloats() : AlignedFloats(int64_t{products[i].m} * products[i].n));
    }
  }

  float* operator[](int i) const {
    float* converted = converted_[i].get();
    return converted != nullptr ? converted : static_cast<float*>(static_cast<void*>(products_[i].y));
  }

  void store() const {
    for (size_t i = 0; i < converted_.size(); ++i) {
      if (const float* from = converted_[i].get()) {
        const Product& p = products_[i];
        parallel_ranges(int64_t{p.m} * p.n, 1, [&](int64_t first, int64_t last) {
          kernels().narrow(
              from + first, type_of_(p), static_cast<uint16_t*>(static_cast<void*>(p.y)) + first, last - first);
        });
      }
    }
  }

 private:
  const Product* products_;
  TypeOf type_of_;
  std::vector<AlignedFloats> converted_; // empty for a result in float32
};

// Computes the first m rows of products of the same few rows x, given in float32. Product i writes to y(i).
void multiply_few_rows(
    const kernel::QuantizedMatmul* products, int count, int m, const float* x, const std::function<float*(int)>& y);

// Memory to prefetch.
struct Bytes {
  const char* begin = nullptr;
  int64_t count = 0;

  // Part `i` of `parts` equal parts.
  Bytes part(int64_t i, int64_t parts) const {
    const int64_t first = count * i / parts;
    return {begin + first, count * (i + 1) / parts - first};
  }
};

// Writes the panel of `rows` rows of k elements in half precision, converted to float32.
inline void pack_halves(
    const uint16_t* w, FloatType type, int64_t row_stride, int64_t column_stride, int rows, int k, float* panel) {
  static thread_local std::vector<float> converted;
  converted.resize(int64_t{rows} * k);
  for (int64_t r = 0; r < rows; ++r) {
    kernels().widen(w + r * row_stride, type, column_stride, converted.data() + r * k, k);
  }
  kernels().pack_panel(converted.data(), k, rows, k, panel);
}

// The number of floats in the panels of `rows` rows of k elements: for a multiple of panel_rows, also where the panel
// of the next row begins.
inline size_t panels_size(int rows, int k) { return panels_of(rows) * kernels().panel_size(k); }

// The panels of a part of a product: its own ones, or else those that `pack` writes to memory of this thread, which are
// valid until the next call. A part has at most kPanelsTogether panels.
template <typename Product, typename Pack>
const float* panels_of_part(const Product* products, const ColumnPart& part, Pack&& pack) {
  const Product& p = products[part.product];
  if (p.panels != nullptr) {
    return p.panels + panels_size(part.first, p.k);
  }
  static thread_local AlignedFloats buffer;
  static thread_local size_t buffer_size = 0;
  const int panel_rows = kernels().panel_rows;
  const size_t needed = panels_size(kPanelsTogether * panel_rows, p.k);
  if (buffer_size < needed) {
    buffer = AlignedFloats(needed);
    buffer_size = needed;
  }
  for (int first = part.first; first < part.last; first += panel_rows) {
    float* const panel = buffer.get() + panels_size(first - part.first, p.k);
    pack(part.product, first, std::min(panel_rows, part.last - first), panel);
  }
  return buffer.get();
}

// Where panels_of_part() reads the weights of a part.
template <typename Product, typename Source>
Bytes weights_of_part(const Product* products, const ColumnPart& part, Source&& source) {
  const Product& p = products[part.product];
  const int count = part.last - part.first;
  if (p.panels == nullptr) {
    return source(part.product, part.first, count);
  }
  const auto* begin = reinterpret_cast<const char*>(p.panels + panels_size(part.first, p.k));
  return {begin, static_cast<int64_t>(panels_size(count, p.k) * sizeof(float))};
}

// Computes products of the same many rows x, of float32 or of pairs. For a product without panels, pack(i, first,
// count, panel) writes the panel of rows first ... first + count - 1 of w [n, k] of product i, in this type, and
// source(i, first, count) is where these rows lie in memory, or empty.
template <typename Product, typename Pack, typename Source>
void multiply_many_rows(const Product* products, int count, FloatType type, Pack&& pack, Source&& source) {
  const auto& simd = kernels();
  const auto& all = products[0]; // x, m and k are those of all products
  const int panel_rows = simd.panel_rows;
  const AlignedFloats x(panels_size(all.m, all.k));
  parallel(panels_of(all.m), [&](int i) {
    const int first = i * panel_rows;
    simd.pack_panel(all.x + first * all.ldx, all.ldx, std::min(panel_rows, all.m - first), all.k,
        x.get() + panels_size(first, all.k));
  });
  constexpr int kRowBlock = 64; // rows of x that are multiplied between prefetches of the next w
  constexpr int kPrefetchingBlocks = 2; // the last ones, because x displaces what is prefetched earlier
  // Floats in the panels of w, up to which the next rows of w are prefetched. Longer rows are read fast without: the
  // processor itself then prefetches them, and other prefetches delay the multiplications.
  constexpr size_t kMaxPrefetched = 32 << 10;
  const bool prefetches = panels_size(kPanelsTogether * panel_rows, all.k) <= kMaxPrefetched;
  const auto parts = panel_parts(products, count);
  const int threads = kernel::threads();
  const int blocks = (all.m + kRowBlock - 1) / kRowBlock;
  // The parts that are left when each thread has had as many as the others are divided into tasks by rows of x.
  const int left = static_cast<int>(parts.size()) % threads;
  const int whole = static_cast<int>(parts.size()) - left;
  const int divisions = left == 0 ? 1 : std::min(blocks, threads / left);
  parallel(whole + left * divisions, [&](int task) {
    const int i = task < whole ? task : whole + (task - whole) / divisions;
    const int division = (task - whole) % divisions;
    const int first_block = task < whole ? 0 : blocks * division / divisions;
    const int end_block = task < whole ? blocks : blocks * (division + 1) / divisions;
    const ColumnPart& part = parts[i];
    const Product& p = products[part.product];
    const float* const w = panels_of_part(products, part, pack);
    // If all threads are equally fast, this one gets part i + threads next. Its rows of w come from memory meanwhile.
    const bool has_next = prefetches && i + threads < static_cast<int>(parts.size());
    const Bytes next = has_next ? weights_of_part(products, parts[i + threads], source) : Bytes{};
    const int prefetching = std::min(blocks, kPrefetchingBlocks);
    for (int b = first_block; b < end_block; ++b) {
      const int row = b * kRowBlock;
      const int rows = std::min(kRowBlock, p.m - row);
      const int last_blocks = b - (blocks - prefetching);
      const Bytes ahead = last_blocks < 0 ? Bytes{} : next.part(last_blocks, prefetching);
      void* y = at(p.y, p.y_type, row * p.ldy + part.first);
      simd.multiply_panels(type, x.get() + panels_size(row, p.k), rows, w, part.last - part.first, p.k, y, p.y_type,
          p.ldy, ahead.begin, ahead.count);
    }
  });
}

// Rows of bfloat16 pairs, x [m, k], in the tiles of multiply_tiles().
class PairTiles {
 public:
  PairTiles(const float* x, int64_t ldx, int m, int k)
      : pairs_(whole_tiles(k) * kTileRows), tiles_(pairs_ * whole_tiles(m) * kTileRows) {
    parallel_ranges(whole_tiles(m), pairs_ * kTileRows, [&](int64_t first, int64_t last) {
      for (int64_t row = first * kTileRows; row < last * kTileRows; row += kTileRows) {
        float* to = tiles_.get() + row * pairs_;
        const auto rows = static_cast<int>(std::min<int64_t>(kTileRows, m - row));
        kernels().transpose_rows(x + row * ldx, FloatType::bfloat16_pair, ldx, rows, k, to, kTileRows);
        std::fill(to + int64_t{k} * kTileRows, to + pairs_ * kTileRows, 0.0f);
      }
    });
  }

  // The tiles from this row on, a multiple of kTileRows.
  const float* from_row(int64_t row) const { return tiles_.get() + row * pairs_; }

 private:
  static int64_t whole_tiles(int rows) { return (int64_t{rows} + kTileRows - 1) / kTileRows; }

  int64_t pairs_; // of a row, with zeros at the end
  AlignedFloats tiles_;
};

// A product with the rows of a matrix w [n, k], which have the distance ldw.
struct RowProduct : Operands {
  const void* w;
  int64_t ldw;
};

// Computes products that differ only in n, y, ldy, y_type, w, ldw and panels. The matrices have elements of `type`,
// which is not float32. x has float32 elements, or pairs if w has.
void multiply_rows_together(const std::vector<RowProduct>& products, FloatType type);

// The same for matrices of float32. The products may also differ in the addend, the activation and the residual.
void multiply_float_rows(const std::vector<RowProduct>& products);

// Packs the rows of w [n, k] for multiply_float_rows(): writes float_panels_size() floats.
size_t float_panels_size(int n, int k);
void pack_float_panels(const float* w, int n, int k, float* panels);

// y = alpha * x @ b + beta * y + addend for a row-major matrix b [k, n] of float32, float16 or bfloat16.
void multiply_columns(const Operands& p, const void* b, FloatType type, int64_t ldb);

} // namespace executorch_mlx
