// cblas_sgemm, which libmlx calls for products of float32 matrices.
#include <algorithm>
#include <atomic>
#include <iterator>
#include <vector>

#include "cblas.h"
#include "products.h"

namespace executorch_mlx {

namespace {

std::atomic<uint64_t> calls{0};

constexpr int64_t kMinParallelWork = 1 << 17; // multiplications
constexpr int kMinPartLength = 64; // rows or columns
constexpr int kFewColumns = 256; // up to which packing w does not pay
constexpr int kStepsPerPass = 256; // rows of b that stay in the cache while all rows of x use them

// Calls run(first, count) for parts of `length` rows or columns, in parallel if there is enough work. All parts but the
// last consist of whole groups of 16 rows or columns. A large product gets more parts than there are threads,
// so that one delayed thread does not delay the product.
template <typename Run>
void for_parts(int64_t work, int length, Run&& run) {
  const int threads = kernel::threads();
  const int most = threads == 1 || work < kMinParallelWork ? 1 : 4 * threads;
  const int parts = std::max(1, std::min(most, length / kMinPartLength));
  parallel(parts, [&](int i) {
    const auto begin = [&](int part) { return static_cast<int>(int64_t{length} * part / parts / 16 * 16); };
    const int first = begin(i);
    run(first, (i + 1 == parts ? length : begin(i + 1)) - first);
  });
}

} // namespace

void multiply_columns(const Operands& p, const void* b, FloatType type, int64_t ldb) {
  if (p.alpha != 1 || p.beta != 0) {
    std::vector<float> product(int64_t{p.m} * p.n);
    Operands plain = p;
    plain.y = product.data();
    plain.ldy = p.n;
    plain.alpha = 1;
    plain.beta = 0;
    multiply_columns(plain, b, type, ldb);
    for (int r = 0; r < p.m; ++r) {
      for (int j = 0; j < p.n; ++j) {
        float& y = p.float_y()[r * p.ldy + j];
        const float scaled = p.alpha * product[int64_t{r} * p.n + j];
        y = p.beta == 0 ? scaled : scaled + p.beta * y;
      }
    }
    return;
  }
  const bool by_columns = p.n >= p.m;
  const auto addend_at = [&](int row, int column, int end) {
    const bool is_last = end >= p.k;
    return is_last && p.addend != nullptr ? p.addend + row * p.ld_addend + column : nullptr;
  };
  for_parts(int64_t{p.m} * p.n * p.k, by_columns ? p.n : p.m, [&](int first, int count) {
    const int row = by_columns ? 0 : first;
    const int column = by_columns ? first : 0;
    for (int i = 0; i == 0 || i < p.k; i += kStepsPerPass) {
      kernels().multiply_columns(p.x + row * p.ldx + i, p.ldx, by_columns ? p.m : count, at(b, type, i * ldb + column),
          type, ldb, by_columns ? count : p.n, std::min(kStepsPerPass, p.k - i), i > 0,
          addend_at(row, column, i + kStepsPerPass), p.ld_addend, p.float_y() + row * p.ldy + column, p.ldy);
    }
  });
}

namespace {

// The rows of x, copied if their distance makes them compete for the same cache lines.
struct PaddedRows {
  PaddedRows(const Operands& p, int columns) : x(p.x), ldx(p.ldx) {
    if (p.m > 2 && columns > 16 * p.m && ldx % 256 == 0) {
      ldx = (p.k + 15) / 16 * 16 + kPadding;
      copy = AlignedFloats(ldx * p.m);
      for (int64_t r = 0; r < p.m; ++r) {
        std::copy_n(p.x + r * p.ldx, p.k, copy.get() + r * ldx);
      }
      x = copy.get();
    }
  }

  const float* x;
  int64_t ldx;
  AlignedFloats copy;
};

// Computes columns first ... last - 1 of y.
void dot_rows(const PaddedRows& x, const RowProduct& p, FloatType type, int first, int last) {
  compute_block(p, 0, p.m, first, last - first, [&](float* y, int64_t ldy) {
    kernels().dot_rows(x.x, x.ldx, p.m, at(p.w, type, first * p.ldw), type, p.ldw, last - first, p.k, y, ldy);
  });
}

// Converts rows of half precision to float32.
void multiply_many_rows(const std::vector<RowProduct>& products, FloatType type) {
  const bool in_pairs = type == FloatType::bfloat16_pair;
  const auto pack = [&](int i, int first, int count, float* panel) {
    const auto& p = products[i];
    const void* rows = at(p.w, type, first * p.ldw);
    if (!in_pairs) {
      return pack_halves(static_cast<const uint16_t*>(rows), type, p.ldw, 1, count, p.k, panel);
    }
    kernels().pack_panel(static_cast<const float*>(rows), p.ldw, count, p.k, panel);
  };
  const auto source = [&](int i, int first, int count) {
    const auto& p = products[i];
    const auto* begin = static_cast<const char*>(at(p.w, type, first * p.ldw));
    return Bytes{begin, count * p.ldw * static_cast<int64_t>(size_of(type))};
  };
  multiply_many_rows(
      products.data(), static_cast<int>(products.size()), in_pairs ? type : FloatType::float32, pack, source);
}

// Computes products of few rows x, of pairs, with matrices in panels.
void multiply_streamed_panels(const std::vector<RowProduct>& products) {
  const auto& all = products[0];
  const auto& simd = kernels();
  const int64_t stride = (all.k + simd.panel_rows - 1) / simd.panel_rows * simd.panel_rows + kPadding;
  const AlignedFloats x(stride * all.m);
  for (int64_t r = 0; r < all.m; ++r) {
    std::fill(std::copy_n(all.x + r * all.ldx, all.k, x.get() + r * stride), x.get() + (r + 1) * stride, 0.0f);
  }
  const int count = static_cast<int>(products.size());
  const int multiple = kPanelsTogether * simd.panel_rows; // of the columns of a part
  const int share = total_columns(products.data(), count) / (4 * kernel::threads());
  const int size = std::max(1, share / multiple) * multiple;
  for_columns(products.data(), count, size, [&](int i, int first, int last) {
    const auto& p = products[i];
    const float* const panels = p.panels + panels_size(first, p.k);
    void* const y = at(p.y, p.y_type, first);
    simd.multiply_streamed_panels(x.get(), stride, p.m, panels, last - first, p.k, y, p.y_type, p.ldy);
  });
}

} // namespace

void multiply_rows_together(const std::vector<RowProduct>& products, FloatType type) {
  const auto& p = products[0];
  if (std::all_of(products.begin(), products.end(), [](const auto& each) { return each.panels != nullptr; })) {
    return p.m > kMaxStreamedRows ? multiply_many_rows(products, type) : multiply_streamed_panels(products);
  }
  if (p.m >= kernels().panels_from_rows && p.k > kFewColumns) {
    return multiply_many_rows(products, type);
  }
  const int count = static_cast<int>(products.size());
  const int columns = total_columns(products.data(), count);
  const PaddedRows x(p, columns);
  const int threads = kernel::threads();
  const bool is_small = threads == 1 || int64_t{p.m} * columns * p.k < kMinParallelWork;
  const int size = is_small ? columns : std::max(kMinPartLength, columns / (4 * threads) / 16 * 16);
  for_columns(
      products.data(), count, size, [&](int i, int first, int last) { dot_rows(x, products[i], type, first, last); });
}

} // namespace executorch_mlx

extern "C" void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a,
    int lda, const float* b, int ldb, float beta, float* c, int ldc) {
  using namespace executorch_mlx;
  if (order != kRowMajor) { // c.T = b.T @ a.T in row-major order
    return cblas_sgemm(kRowMajor, trans_b, trans_a, n, m, k, alpha, b, ldb, a, lda, beta, c, ldc);
  }
  calls.fetch_add(1, std::memory_order_relaxed);
  if (m <= 0 || n <= 0) {
    return;
  }
  Operands p{.x = a, .ldx = lda, .y = c, .ldy = ldc, .m = m, .n = n, .k = std::max(0, k), .alpha = alpha, .beta = beta};
  std::vector<float> a_copy;
  if (trans_a != kNoTranspose) {
    a_copy.resize(int64_t{m} * p.k);
    for (int r = 0; r < m; ++r) {
      for (int i = 0; i < p.k; ++i) {
        a_copy[int64_t{r} * p.k + i] = a[int64_t{i} * lda + r];
      }
    }
    p.x = a_copy.data();
    p.ldx = p.k;
  }
  if (trans_b != kNoTranspose) {
    return multiply_float_rows({{p, b, ldb}});
  }
  multiply_columns(p, b, FloatType::float32, ldb);
}

namespace executorch_mlx {

namespace {

// The product with the rows of b.T.
RowProduct row_product(const kernel::Matmul& p) {
  const bool has_addend = p.c != nullptr && p.beta == 1;
  for (int row = 0; p.c != nullptr && !has_addend && row < p.m; ++row) {
    std::copy_n(p.c + row * p.c_stride, p.n, p.y + int64_t{row} * p.n);
  }
  RowProduct product{{.x = p.x,
                         .ldx = p.k,
                         .y = p.y,
                         .ldy = p.n,
                         .m = p.m,
                         .n = p.n,
                         .k = p.k,
                         .alpha = p.alpha,
                         .beta = p.c == nullptr || has_addend ? 0 : p.beta,
                         .addend = has_addend ? p.c : nullptr,
                         .ld_addend = p.c_stride,
                         .panels = p.panels},
      p.b, p.b_column_stride};
  if (p.epilogue != nullptr) {
    product.activation = p.epilogue->activation;
    product.residual = p.epilogue->residual;
  }
  return product;
}

} // namespace

void kernel::matmul(const Matmul& p) {
  count_product_call();
  if (p.b_column_stride != 1) {
    return multiply_float_rows({row_product(p)});
  }
  const Operands operands{
      .x = p.x, .ldx = p.k, .y = p.y, .ldy = p.n, .m = p.m, .n = p.n, .k = p.k, .addend = p.c, .ld_addend = p.c_stride};
  if (p.alpha == 1 && (p.c == nullptr || p.beta == 1)) {
    return multiply_columns(operands, p.b, FloatType::float32, p.b_row_stride);
  }
  for (int row = 0; p.c != nullptr && row < p.m; ++row) {
    std::copy_n(p.c + row * p.c_stride, p.n, p.y + int64_t{row} * p.n);
  }
  cblas_sgemm(kRowMajor, kNoTranspose, kNoTranspose, p.m, p.n, p.k, p.alpha, p.x, p.k, p.b,
      static_cast<int>(p.b_row_stride), p.c != nullptr ? p.beta : 0.0f, p.y, p.n);
}

void kernel::matmuls(const Matmul* matmuls, int count) {
  count_product_call();
  std::vector<RowProduct> products;
  std::transform(matmuls, matmuls + count, std::back_inserter(products), row_product);
  multiply_float_rows(products);
}

size_t kernel::panels_size(FloatType type, int n, int k) {
  if (k <= kFewColumns) {
    return 0;
  }
  if (type == FloatType::float32) {
    return float_panels_size(n, k) * sizeof(float);
  }
  const bool in_pairs = multiplies_in_pairs(type, k) && kernels().multiply_tiles == nullptr;
  return in_pairs ? executorch_mlx::panels_size(n, k / 2) * sizeof(float) : 0;
}

void kernel::pack_panels(const void* w, FloatType type, int n, int k, float* panels) {
  if (type == FloatType::float32) {
    return pack_float_panels(static_cast<const float*>(w), n, k, panels);
  }
  const auto& simd = kernels();
  const int pairs = k / 2;
  parallel(panels_of(n), [&](int i) {
    const int first = i * simd.panel_rows;
    const auto* rows = static_cast<const float*>(w) + int64_t{first} * pairs;
    const int count = std::min(simd.panel_rows, n - first);
    simd.pack_panel(rows, pairs, count, pairs, panels + executorch_mlx::panels_size(first, pairs));
  });
}

uint64_t kernel::blas_calls() { return calls.load(std::memory_order_relaxed); }

} // namespace executorch_mlx
