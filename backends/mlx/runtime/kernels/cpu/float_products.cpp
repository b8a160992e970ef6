// Products of float32 rows x with the rows of float32 matrices, packed in panels or not: the same bits either way.
#include <algorithm>
#include <vector>

#include "products.h"

namespace executorch_mlx {

namespace {

constexpr int64_t kMinParallelWork = 1 << 17; // multiplications

int lanes() { return kernels().float_panel_rows / 3; }

size_t panel_floats(int rows, int k) {
  return static_cast<size_t>((rows + lanes() - 1) / lanes() * lanes()) * static_cast<size_t>(k);
}

// The rows of x, copied if their distance makes them compete for the same cache lines.
class SpreadRows {
 public:
  SpreadRows(const Operands& p, int columns) : x(p.x), ldx(p.ldx) {
    constexpr int kPage = 1024; // floats; rows at this distance share a few lines of the first-level cache
    if (p.m > 2 && columns > 16 && ldx % kPage == 0) {
      ldx = p.k + kPadding;
      copy_ = AlignedFloats(ldx * p.m);
      parallel_ranges(p.m, p.k, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
          std::copy_n(p.x + r * p.ldx, p.k, copy_.get() + r * ldx);
        }
      });
      x = copy_.get();
    }
  }

  const float* x;
  int64_t ldx;

 private:
  AlignedFloats copy_;
};

// The results of a product from this row and column on.
FloatResults results_of(const RowProduct& p, int row, int column) {
  const int64_t offset = row * p.ldy + column;
  return {.y = p.float_y() + offset,
      .ldy = p.ldy,
      .alpha = p.alpha,
      .beta = p.beta,
      .addend = p.addend == nullptr ? nullptr : p.addend + row * p.ld_addend + column,
      .ld_addend = p.ld_addend,
      .activation = p.activation,
      .residual = p.residual == nullptr ? nullptr : p.residual + offset};
}

// Computes columns first ... last - 1 for few rows of x and a matrix without panels.
void multiply_few_rows_by_part(const RowProduct& p, int first, int last) {
  constexpr int kColumns = 256;
  alignas(64) float totals[kMaxTransposedRows * kColumns];
  const auto* w = static_cast<const float*>(p.w);
  for (int column = first; column < last; column += kColumns) {
    const int columns = std::min(kColumns, last - column);
    kernels().multiply_transposed(
        p.x, p.ldx, p.m, w + column * p.ldw, FloatType::float32, p.ldw, columns, p.k, totals, kColumns);
    kernels().finish_float_results(totals, kColumns, p.m, columns, results_of(p, 0, column));
  }
}

// The rows of x in a task: as many as stay in the second-level cache beside two panels while the tasks of these rows
// follow each other.
int rows_of_task(int m, int k) {
  constexpr int64_t kFloats = 64 << 10;
  constexpr int kMultiple = 8, kSmallest = 48;
  const int most = static_cast<int>(std::max<int64_t>(kSmallest, kFloats / std::max(1, k)));
  const int tasks = (m + most - 1) / most;
  return ((m + tasks - 1) / tasks + kMultiple - 1) / kMultiple * kMultiple;
}

// The panel of rows first ... last - 1 of w: that of the product, or else one in memory of this thread, which is valid
// until the next call.
const float* panel_of(const RowProduct& p, int first, int last) {
  if (p.panels != nullptr) {
    return p.panels + int64_t{first} * p.k;
  }
  static thread_local std::vector<float> buffer; // never smaller than the largest panel so far
  constexpr size_t kLine = 64 / sizeof(float);
  const size_t needed = panel_floats(kernels().float_panel_rows, p.k) + kLine;
  buffer.resize(std::max(buffer.size(), needed));
  float* const panel = buffer.data() + (kLine - reinterpret_cast<uintptr_t>(buffer.data()) / sizeof(float) % kLine);
  kernels().pack_float_panel(static_cast<const float*>(p.w) + first * p.ldw, p.ldw, last - first, p.k, panel);
  return panel;
}

} // namespace

size_t float_panels_size(int n, int k) {
  const int panel = kernels().float_panel_rows;
  return static_cast<size_t>(n / panel * panel) * static_cast<size_t>(k) + panel_floats(n % panel, k);
}

void pack_float_panels(const float* w, int n, int k, float* panels) {
  const int rows = kernels().float_panel_rows;
  parallel((n + rows - 1) / rows, [&](int i) {
    const int64_t first = int64_t{i} * rows;
    kernels().pack_float_panel(w + first * k, k, std::min<int>(rows, n - first), k, panels + first * k);
  });
}

void multiply_float_rows(const std::vector<RowProduct>& products) {
  const auto& all = products[0]; // x, m and k are those of all products
  const int count = static_cast<int>(products.size());
  const int columns = total_columns(products.data(), count);
  const int threads = int64_t{all.m} * columns * all.k < kMinParallelWork ? 1 : kernel::threads();
  const bool is_packed =
      std::all_of(products.begin(), products.end(), [](const auto& p) { return p.panels != nullptr; });
  if (!is_packed && all.m <= kMaxTransposedRows) {
    constexpr int kSmallest = 64; // columns of a part
    const int size = threads == 1 ? columns : std::max(kSmallest, columns / (4 * threads) / 16 * 16);
    return for_columns(products.data(), count, size,
        [&](int i, int first, int last) { multiply_few_rows_by_part(products[i], first, last); });
  }
  const SpreadRows x(all, columns);
  const auto parts = column_parts(products.data(), count, kernels().float_panel_rows);
  const int num_parts = static_cast<int>(parts.size());
  const int step = rows_of_task(all.m, all.k);
  const int blocks = (all.m + step - 1) / step;
  const auto run = [&](int task) {
    const int i = task % num_parts;
    const int row = task / num_parts * step;
    const ColumnPart& part = parts[i];
    const RowProduct& p = products[part.product];
    const float* const panel = panel_of(p, part.first, part.last);
    // If all threads are equally fast, this one gets part i + threads next. Its panel comes from memory meanwhile. With
    // a single row, which waits for each panel anyway, the processor prefetches faster by itself.
    const bool has_next = is_packed && p.m > 1 && i + threads < num_parts;
    const ColumnPart& next = parts[has_next ? i + threads : i];
    kernels().multiply_float_panel(x.x + row * x.ldx, x.ldx, std::min(step, p.m - row), panel, part.last - part.first,
        p.k, results_of(p, row, part.first),
        has_next ? panel_of(products[next.product], next.first, next.last) : nullptr);
  };
  if (threads > 1) {
    return parallel(blocks * num_parts, run);
  }
  for (int task = 0; task < blocks * num_parts; ++task) {
    run(task);
  }
}

} // namespace executorch_mlx
