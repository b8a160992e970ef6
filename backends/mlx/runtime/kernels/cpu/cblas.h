// The CBLAS functions that libmlx calls.
#pragma once

#include <cstdint>

#include "api.h"

extern "C" {

EXECUTORCH_MLX_KERNEL_API void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
    const float* a, int lda, const float* b, int ldb, float beta, float* c, int ldc);
EXECUTORCH_MLX_KERNEL_API void cblas_dgemm(int order, int trans_a, int trans_b, int m, int n, int k, double alpha,
    const double* a, int lda, const double* b, int ldb, double beta, double* c, int ldc);
EXECUTORCH_MLX_KERNEL_API void cblas_cgemm(int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha,
    const void* a, int lda, const void* b, int ldb, const void* beta, void* c, int ldc);

} // extern "C"

namespace executorch_mlx {

// Values of CBLAS's enumerations.
enum : int { kRowMajor = 101, kNoTranspose = 111, kTranspose = 112 };

namespace kernel {

// The name that OpenBLAS reports, such as "OpenBLAS 0.3.34 ...", or "mlx" if cblas_dgemm and cblas_cgemm forward to the
// BLAS in the mlx wheel. cblas_sgemm forwards to neither.
EXECUTORCH_MLX_KERNEL_API const char* blas_name();

// Returns the number of calls of cblas_sgemm so far. If it rises with a product in MLX, libmlx calls this library.
EXECUTORCH_MLX_KERNEL_API uint64_t blas_calls();

} // namespace kernel

} // namespace executorch_mlx
