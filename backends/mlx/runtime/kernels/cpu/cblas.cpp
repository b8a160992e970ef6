// The CBLAS functions that libmlx calls for float64 and complex matrices, forwarded to OpenBLAS. sgemm.cpp has the one
// for float32. ../README.md explains why libmlx calls these functions instead of the BLAS library in the mlx wheel.
//
// scipy-openblas32 contains OpenBLAS under prefixed names such as scipy_cblas_dgemm, which do not collide with
// the names below.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

#include "cblas.h"

namespace {

using namespace executorch_mlx;

using Dgemm = decltype(&cblas_dgemm);
using Cgemm = decltype(&cblas_cgemm);

struct Blas {
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
  if (library == nullptr || !load_symbol(library, "scipy_cblas_dgemm", blas.dgemm) ||
      !load_symbol(library, "scipy_cblas_cgemm", blas.cgemm)) {
    return false;
  }
  char* (*config)() = nullptr;
  blas.name = load_symbol(library, "scipy_openblas_get_config", config) ? config() : "OpenBLAS";
  // OpenBLAS gets a single thread. Several threads of OpenBLAS would spin while they wait for each other, which is slow
  // if they share processors with the threads of the pool.
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
  return library != nullptr && load_symbol(library, "cblas_dgemm", blas.dgemm) &&
      load_symbol(library, "cblas_cgemm", blas.cgemm) && blas.dgemm != &cblas_dgemm;
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

} // namespace

extern "C" {

void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double* a, int lda,
    const double* b, int ldb, double beta, double* c, int ldc) {
  blas().dgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a, int lda,
    const void* b, int ldb, const void* beta, void* c, int ldc) {
  blas().cgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

} // extern "C"

const char* executorch_mlx::kernel::blas_name() { return blas().name; }
