// The plain names of CBLAS that libmlx imports, what is known of who answers them, and kernels of ours.
#pragma once

#include <cstdint>

#define EXECUTORCH_MLX_BLAS_API __attribute__((visibility("default")))

extern "C" {

// Enumerations of cblas.h are ints here: order 101 is row-major, a trans of 112 transposes.
EXECUTORCH_MLX_BLAS_API void cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc);
EXECUTORCH_MLX_BLAS_API void cblas_dgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double* a, int lda,
    const double* b, int ldb, double beta, double* c, int ldc);
EXECUTORCH_MLX_BLAS_API void cblas_cgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a, int lda,
    const void* b, int ldb, const void* beta, void* c, int ldc);

// "OpenBLAS 0.3.34 ...", or "mlx" where the calls go on to what MLX came with.
EXECUTORCH_MLX_BLAS_API const char* executorch_mlx_blas_name();

// float32 products that went through here: tells whether libmlx calls us.
EXECUTORCH_MLX_BLAS_API uint64_t executorch_mlx_blas_calls();

// Threads that products use, OpenBLAS's and our own: OPENBLAS_NUM_THREADS or OMP_NUM_THREADS, else
// the processors that this process may run on, by affinity and by the quota of its container.
EXECUTORCH_MLX_BLAS_API int executorch_mlx_threads();

// item(context, 0) … item(context, count - 1) on the threads of products: see pool.h.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_parallel(int count, void (*item)(void*, int), void* context);

// y [m, n] = x [m, k] times the transpose of w [n, k], which MLX's affine quantization has packed:
// w is [n, k * bits / 32], scales and biases are [n, k / group_size] of `scale_type` 0 float32,
// 1 float16 or 2 bfloat16. Everything is contiguous; sums are in float32.
struct ExecutorchMlxQuantized {
  const float* x;
  const uint32_t* w;
  const void* scales;
  const void* biases;
  int scale_type;
  int bits;
  int group_size;
  int m;
  int n;
  int k;
  float* y;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_quantized_product(const ExecutorchMlxQuantized* product);

// Whether executorch_mlx_quantized_product has kernels for it.
EXECUTORCH_MLX_BLAS_API bool executorch_mlx_quantized_is_fast(int bits, int group_size, int k);

// y [m, n] = x [m, k] times the transpose of w [n, k], float16 (`type` 1) or bfloat16 (2), the numbers of
// which are `row` and `column` apart. x and y are contiguous; sums are in float32.
struct ExecutorchMlxHalf {
  const float* x;
  const uint16_t* w;
  int type;
  int64_t row;
  int64_t column;
  int m;
  int n;
  int k;
  float* y;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_half_product(const ExecutorchMlxHalf* product);

// What MLX's CPU backend makes of several passes over memory, in one; all is float32, and contiguous
// but for the x of the last.

// y = x / (1 + exp(-x)).
EXECUTORCH_MLX_BLAS_API void executorch_mlx_silu(const float* x, float* y, int64_t count);

// Each row of x [rows, width] over the root of the mean of its squares and eps, times weight [width],
// which may be null.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_rms_norm(
    const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps);

// Rotary position embedding of x [batch, heads, tokens, width], of any strides, into y. Of the first
// 2 * half numbers of a row, i turns with half + i by (offset + token) * scale / period: periods
// [half], or null for base^(i / half).
struct ExecutorchMlxRope {
  const float* x;
  int64_t strides[4];  // in elements
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t width;
  int64_t half;
  const int32_t* offsets;  // one, or one for each of the batch
  bool offset_for_each;
  const float* periods;
  float base;
  float scale;
  float* y;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_rope(const ExecutorchMlxRope* rope);

// Matrices [batch, heads, rows, columns] of any strides, in elements.
struct ExecutorchMlxHeads {
  const float* data;
  int64_t strides[4];
};

// y [batch, heads, queries, values] = softmax(scale * q k^T + mask) v, where q has `heads` heads of
// `width` numbers, and k and v have `kv_heads`, each for heads / kv_heads of q that follow one another.
struct ExecutorchMlxAttention {
  ExecutorchMlxHeads q;
  ExecutorchMlxHeads k;
  ExecutorchMlxHeads v;
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t width;
  int64_t values;
  bool causal;  // the last query sees all keys, each one before it one less
  // A mask, or null: which keys a query sees, or what is added to the scores.
  const bool* seen;
  const float* added;
  int64_t mask_strides[4];
  float scale;
  float* y;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_attention(const ExecutorchMlxAttention* attention);

// "avx512", "avx2" or "portable" in the place of the best that this processor has; false if it does
// not have it. For tests: not while products run.
EXECUTORCH_MLX_BLAS_API bool executorch_mlx_use_kernels(const char* name);

} // extern "C"
