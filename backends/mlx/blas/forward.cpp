// The matrix products that libmlx asks of a CBLAS, handed on to OpenBLAS.
//
// The mlx wheel for Linux brings the reference BLAS, about a hundred times slower than OpenBLAS.
// scipy-openblas32 carries OpenBLAS under prefixed names, which take nobody's place. This library
// defines the plain ones: wherever it comes before libmlx in the search order of symbols, MLX calls
// it. Without OpenBLAS the calls go on to the library that MLX came with.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "kernels.h"
#include "pool.h"

namespace {

using executorch_mlx::FloatType;
using executorch_mlx::kMostRows;
using executorch_mlx::kernels;
using executorch_mlx::parallel;

using Sgemm = decltype(&cblas_sgemm);
using Dgemm = decltype(&cblas_dgemm);
using Cgemm = decltype(&cblas_cgemm);

std::atomic<uint64_t> calls{0};

struct Blas {
  Sgemm sgemm;
  Dgemm dgemm;
  Cgemm cgemm;
  const char* name;
};

template <typename Function>
bool find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  return function != nullptr;
}

// Found by this library's own run path: scipy_openblas32/lib beside the package.
bool find_openblas(Blas& blas) {
  void* library = dlopen("libscipy_openblas.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr || !find(library, "scipy_cblas_sgemm", blas.sgemm) ||
      !find(library, "scipy_cblas_dgemm", blas.dgemm) || !find(library, "scipy_cblas_cgemm", blas.cgemm)) {
    return false;
  }
  char* (*config)() = nullptr;
  blas.name = find(library, "scipy_openblas_get_config", config) ? config() : "OpenBLAS";
  // Its threads wait for each other in loops, which costs a lot where they have to share processors.
  // Products are split here instead, into parts that do not meet.
  void (*set_threads)(int) = nullptr;
  if (find(library, "scipy_openblas_set_num_threads", set_threads)) {
    set_threads(1);
  }
  return true;
}

// What libmlx would have called without us is among its own libraries.
bool find_mlx(Blas& blas) {
  void* library = dlopen("libmlx.so", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  blas.name = "mlx";
  return library != nullptr && find(library, "cblas_sgemm", blas.sgemm) &&
      find(library, "cblas_dgemm", blas.dgemm) && find(library, "cblas_cgemm", blas.cgemm) &&
      blas.sgemm != &cblas_sgemm;
}

const Blas& blas() {
  static const Blas found = [] {
    Blas blas{};
    if (!find_openblas(blas) && !find_mlx(blas)) {
      std::fputs("executorch_mlx: neither OpenBLAS nor libmlx's own BLAS is there to multiply matrices\n", stderr);
      std::abort();
    }
    return blas;
  }();
  return found;
}

constexpr int kRowMajor = 101;
constexpr int kNoTranspose = 111;
constexpr int64_t kWorthSharing = 1 << 19;  // multiplications
constexpr int kNarrowest = 64;

struct Share {
  int begin;
  int end;
};

// Part `i` of `length`, in multiples of 16: what a kernel has in its registers.
Share share(int length, int parts, int i) {
  const int64_t steps = (length + 15) / 16;
  return {static_cast<int>(std::min<int64_t>(length, steps * i / parts * 16)),
          static_cast<int>(std::min<int64_t>(length, steps * (i + 1) / parts * 16))};
}

// More parts than threads, so that one that is held up does not hold up all. `length` is the extent
// that is split.
int parts_of(int64_t work, int length) {
  const int threads = executorch_mlx_threads();
  if (threads == 1 || work < kWorthSharing) {
    return 1;
  }
  return std::max(1, std::min(4 * threads, length / kNarrowest));
}

// A few rows of a times the rows of b: each of b is read once.
bool is_dot_rows(int order, int trans_a, int trans_b, int m) {
  return order == kRowMajor && trans_a == kNoTranspose && trans_b != kNoTranspose && m <= kMostRows;
}

} // namespace

extern "C" {

void cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc) {
  calls.fetch_add(1, std::memory_order_relaxed);
  const int64_t work = int64_t{m} * n * k;
  if (is_dot_rows(order, trans_a, trans_b, m) && m > 0 && k > 0) {
    const int parts = parts_of(4 * work, n);
    return parallel(parts, [&](int i) {
      const auto [begin, end] = share(n, parts, i);
      kernels().dot_rows(
          a, lda, m, b + int64_t{begin} * ldb, FloatType::float32, ldb, end - begin, k, alpha, beta, c + begin, ldc);
    });
  }
  const auto& sgemm = blas().sgemm;
  const bool by_columns = n >= m;
  const int parts = order == kRowMajor ? parts_of(work, by_columns ? n : m) : 1;
  parallel(parts, [&](int i) {
    const auto [begin, end] = share(by_columns ? n : m, parts, i);
    const int64_t size = end - begin;
    if (size == 0) {
      return;
    }
    if (by_columns) {
      const int64_t step = trans_b == kNoTranspose ? 1 : ldb;
      sgemm(order, trans_a, trans_b, m, size, k, alpha, a, lda, b + begin * step, ldb, beta, c + begin, ldc);
    } else {
      const int64_t step = trans_a == kNoTranspose ? lda : 1;
      sgemm(order, trans_a, trans_b, size, n, k, alpha, a + begin * step, lda, b, ldb, beta, c + begin * int64_t{ldc}, ldc);
    }
  });
}

void cblas_dgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double* a, int lda,
    const double* b, int ldb, double beta, double* c, int ldc) {
  blas().dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a, int lda,
    const void* b, int ldb, const void* beta, void* c, int ldc) {
  blas().cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

const char* executorch_mlx_blas_name() {
  return blas().name;
}

uint64_t executorch_mlx_blas_calls() {
  return calls.load(std::memory_order_relaxed);
}

} // extern "C"
