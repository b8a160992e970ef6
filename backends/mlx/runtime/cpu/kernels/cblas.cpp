// The CBLAS functions that libmlx calls, forwarded to OpenBLAS. ../README.md explains why libmlx calls the functions of
// this file instead of the BLAS library in the mlx wheel.
//
// scipy-openblas32 contains OpenBLAS under prefixed names such as scipy_cblas_sgemm, which do not collide with
// the names below.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "pool.h"
#include "simd/kernels.h"

namespace {

using namespace executorch_mlx;

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
bool load_symbol(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  return function != nullptr;
}

// Fills `blas` with the functions of OpenBLAS. Returns false if OpenBLAS is not found. dlopen() searches the run path
// of this library, which names the folder of the scipy_openblas32 wheel.
bool load_openblas(Blas& blas) {
  void* library = dlopen("libscipy_openblas.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr || !load_symbol(library, "scipy_cblas_sgemm", blas.sgemm) ||
      !load_symbol(library, "scipy_cblas_dgemm", blas.dgemm) ||
      !load_symbol(library, "scipy_cblas_cgemm", blas.cgemm)) {
    return false;
  }
  char* (*config)() = nullptr;
  blas.name = load_symbol(library, "scipy_openblas_get_config", config) ? config() : "OpenBLAS";
  // OpenBLAS gets a single thread. Several threads of OpenBLAS would spin while they wait for each other, which is slow
  // if they share processors. Instead, this file splits a product into independent parts and runs them on the pool.
  void (*set_threads)(int) = nullptr;
  if (load_symbol(library, "scipy_openblas_set_num_threads", set_threads)) {
    set_threads(1);
  }
  return true;
}

// Fills `blas` with the functions that libmlx is linked with and would call without this library. Returns false if
// they are not found.
bool load_mlx_blas(Blas& blas) {
  void* library = dlopen("libmlx.so", RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  blas.name = "mlx";
  return library != nullptr && load_symbol(library, "cblas_sgemm", blas.sgemm) &&
      load_symbol(library, "cblas_dgemm", blas.dgemm) && load_symbol(library, "cblas_cgemm", blas.cgemm) &&
      blas.sgemm != &cblas_sgemm;
}

const Blas& blas() {
  static const Blas loaded = [] {
    Blas blas{};
    if (!load_openblas(blas) && !load_mlx_blas(blas)) {
      std::fputs("executorch_mlx: cannot multiply matrices: found neither OpenBLAS nor the BLAS of libmlx\n", stderr);
      std::abort();
    }
    return blas;
  }();
  return loaded;
}

constexpr int64_t kMinParallelWork = 1 << 19;  // multiplications
constexpr int kMinPartLength = 64;  // rows or columns

struct Range {
  int begin;
  int end;
};

// Returns part `i` of [0, length) split into `parts` parts. Parts begin at multiples of 16, the width of a tile in
// registers.
Range part_of(int length, int parts, int i) {
  const int64_t steps = (length + 15) / 16;
  return {static_cast<int>(std::min<int64_t>(length, steps * i / parts * 16)),
          static_cast<int>(std::min<int64_t>(length, steps * (i + 1) / parts * 16))};
}

// Returns the number of parts into which to split `length` rows or columns of a product of `work` multiplications. A
// large product gets more parts than there are threads, so that one delayed thread does not delay the product.
int count_parts(int64_t work, int length) {
  const int threads = executorch_mlx_threads();
  if (threads == 1 || work < kMinParallelWork) {
    return 1;
  }
  return std::max(1, std::min(4 * threads, length / kMinPartLength));
}

// Whether to compute a product with the kernel dot_rows, which is faster than OpenBLAS if a matrix of few rows is
// multiplied by a transposed matrix.
bool suits_dot_rows(int order, int trans_a, int trans_b, int m) {
  return order == kRowMajor && trans_a == kNoTranspose && trans_b != kNoTranspose && m <= kMaxRows;
}

} // namespace

extern "C" {

void cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc) {
  calls.fetch_add(1, std::memory_order_relaxed);
  const int64_t work = int64_t{m} * n * k;
  if (suits_dot_rows(order, trans_a, trans_b, m) && m > 0 && k > 0) {
    // Such a product is bound by memory, so more threads help from a quarter of kMinParallelWork on: hence 4 * work.
    const int parts = count_parts(4 * work, n);
    return parallel(parts, [&](int i) {
      const auto [begin, end] = part_of(n, parts, i);
      kernels().dot_rows(
          a, lda, m, b + int64_t{begin} * ldb, FloatType::float32, ldb, end - begin, k, alpha, beta, c + begin, ldc);
    });
  }
  const auto& sgemm = blas().sgemm;
  const bool by_columns = n >= m;
  const int parts = order == kRowMajor ? count_parts(work, by_columns ? n : m) : 1;
  parallel(parts, [&](int i) {
    const auto [begin, end] = part_of(by_columns ? n : m, parts, i);
    const int64_t size = end - begin;
    if (size == 0) {
      return;
    }
    if (by_columns) {
      const int64_t step = trans_b == kNoTranspose ? 1 : ldb;
      sgemm(order, trans_a, trans_b, m, size, k, alpha, a, lda, b + begin * step, ldb, beta, c + begin, ldc);
    } else {
      const int64_t step = trans_a == kNoTranspose ? lda : 1;
      sgemm(
          order, trans_a, trans_b, size, n, k, alpha, a + begin * step, lda, b, ldb, beta, c + begin * int64_t{ldc}, ldc);
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
