// The C API of libmlx_blas: the CBLAS functions that libmlx calls, and the kernels of this project.
// ../README.md explains why this is a library of its own.
//
// Matrices are row-major and arrays are contiguous, except where a function takes strides. Strides count elements.
// Kernels compute in float32. All of them use the threads of one pool. A row of a result does not depend on the number
// of rows in the call: see "Order of summation" in ../README.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "elementwise_step.h"
#include "float_type.h"
#include "recurrent_loop.h"

#define EXECUTORCH_MLX_BLAS_API __attribute__((visibility("default")))

namespace executorch_mlx {

// Values of CBLAS's enumerations.
enum : int { kRowMajor = 101, kNoTranspose = 111, kTranspose = 112 };

} // namespace executorch_mlx

extern "C" {

// -- CBLAS ---------------------------------------------------------------------------------------

EXECUTORCH_MLX_BLAS_API void cblas_sgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda,
    const float* b, int ldb, float beta, float* c, int ldc);
EXECUTORCH_MLX_BLAS_API void cblas_dgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double* a, int lda,
    const double* b, int ldb, double beta, double* c, int ldc);
EXECUTORCH_MLX_BLAS_API void cblas_cgemm(
    int order, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a, int lda,
    const void* b, int ldb, const void* beta, void* c, int ldc);

// The name that OpenBLAS reports, such as "OpenBLAS 0.3.34 ...", or "mlx" if cblas_dgemm and cblas_cgemm forward to the
// BLAS in the mlx wheel. cblas_sgemm forwards to neither.
EXECUTORCH_MLX_BLAS_API const char* executorch_mlx_blas_name();

// Returns the number of calls of cblas_sgemm so far. If it rises with a product in MLX, libmlx calls this library.
EXECUTORCH_MLX_BLAS_API uint64_t executorch_mlx_blas_calls();

// -- threads -------------------------------------------------------------------------------------

// Returns the number of threads in the pool: the environment variable OPENBLAS_NUM_THREADS or OMP_NUM_THREADS if one
// is set, or else the number of processors that the process may use: those of its affinity mask, and in a container not
// more than the CPU quota (cgroup version 2).
EXECUTORCH_MLX_BLAS_API int executorch_mlx_threads();

// Calls item(context, 0) ... item(context, count - 1) on the threads of the pool, and returns when all calls have
// returned. The function parallel() in pool.h is the C++ form of this one.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_parallel(int count, void (*item)(void*, int), void* context);

// -- instruction sets ----------------------------------------------------------------------------

// The environment variable that chooses the instruction set of the kernels. Without it, or if this processor does not
// support that instruction set, the kernels are those of the fastest one.
#define EXECUTORCH_MLX_CPU_KERNELS "EXECUTORCH_MLX_CPU_KERNELS"

// Returns the instruction set of the kernels: "amx", "avx512_bf16", "avx512", "avx2" or "portable".
EXECUTORCH_MLX_BLAS_API const char* executorch_mlx_kernels();

// Returns the instruction sets that this processor supports, such as "avx2, portable".
EXECUTORCH_MLX_BLAS_API const char* executorch_mlx_all_kernels();

// -- matrix products -----------------------------------------------------------------------------

// y [m, n] = alpha * x [m, k] @ b [k, n] + beta * c. x and y are contiguous. b is row-major (`b_column_stride` is 1) or
// column-major (`b_row_stride` is 1).
struct ExecutorchMlxMatmul {
  const float* x;
  const float* b;
  int64_t b_row_stride;
  int64_t b_column_stride;
  const float* packed_b;  // b from executorch_mlx_pack_columns() for m rows, or null; alpha and beta are then 1
  const float* c;    // null if there is none; beta is then not used
  int64_t c_stride;  // the distance between the rows of c; 0 if c is a single row, which is added to all rows
  int m;
  int n;
  int k;
  float alpha;
  float beta;
  float* y;
  // Of b.T, from executorch_mlx_pack_panels(), or null. b is then column-major without gaps. Only executorch_mlx_matmuls
  // uses it.
  const float* panels;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_matmul(const ExecutorchMlxMatmul* matmul);

// `count` products at once, which differ only in b, panels, c, c_stride, n and y. b is column-major, packed_b is null, and
// alpha and beta are 1. Each result has the same bits as that of executorch_mlx_matmul.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_matmuls(const ExecutorchMlxMatmul* matmuls, int count);

// Packs a matrix in rows, b [k, n] with n > 1, for products with `rows` rows of x. The products get faster, and keep
// their bits. Writes k * n numbers.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_pack_columns(
    const float* b, int64_t row_stride, int k, int n, int rows, float* packed);

// Packs the rows of w [n, k], of float32 or bfloat16, for all products with w.T. The products get faster, and keep their
// bits. Writes executorch_mlx_panels_size() bytes, which should begin at a cache line. This size is 0 if no product uses
// the panels.
EXECUTORCH_MLX_BLAS_API size_t executorch_mlx_panels_size(executorch_mlx::FloatType type, int n, int k);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_pack_panels(
    const void* w, executorch_mlx::FloatType type, int n, int k, float* panels);

// The loop over the time steps of a recurrent layer. Each time step multiplies the state `hidden` of all `rows` by the
// weights [units, gates * units], adds the addend, and computes the values of the cell. recurrent_loop.h describes
// them. Each result has the same bits as that of executorch_mlx_matmul and executorch_mlx_elementwise_steps.
struct ExecutorchMlxRecurrentLoop {
  int time_steps;
  int rows;
  int units;
  int gates;
  int max_blocks;       // of all values
  const float* packed;  // the weights from executorch_mlx_pack_recurrent()
  executorch_mlx::CellInput addend;  // data is null if there is none
  int hidden;  // the carry that is multiplied
  const executorch_mlx::CellCarry* carries;  // the next values are results of steps that are not copies
  int num_carries;
  const executorch_mlx::CellInput* inputs;
  int num_inputs;
  const executorch_mlx::CellStep* steps;
  int num_steps;
  const executorch_mlx::CellOutput* outputs;
  int num_outputs;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_recurrent_loop(const ExecutorchMlxRecurrentLoop* loop);

// Packs the weights b [units, gates * units] for executorch_mlx_recurrent_loop(), in the order in which it reads them.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_pack_recurrent(
    const float* b, int64_t row_stride, int units, int gates, float* packed);

// y [m, n] = x [m, k] @ w.T, where w [n, k] is in MLX's affine packing: w is stored as [n, k * bits / 32],
// scales and biases as [n, k / group_size].
struct ExecutorchMlxQuantizedMatmul {
  const void* x = nullptr;
  const uint32_t* w;
  const void* scales;
  const void* biases;
  executorch_mlx::FloatType scale_type;  // of scales and biases
  int bits;
  int group_size;
  int m = 0;
  int n;
  int k;
  void* y = nullptr;
  executorch_mlx::FloatType type = executorch_mlx::FloatType::float32;  // of x and y
  // From executorch_mlx_pack_integer_panels, or null. executorch_mlx_quantized_matmul ignores it.
  const void* integer_panels = nullptr;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_quantized_matmul(const ExecutorchMlxQuantizedMatmul* matmul);

// `count` products at once, which differ only in w, scales, biases, scale_type, n and y. Each result has the same bits
// as that of executorch_mlx_quantized_matmul.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_quantized_matmuls(const ExecutorchMlxQuantizedMatmul* matmuls, int count);

// y [n, k] = w. Reads the fields of w, and not x and m. y is float32.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_dequantize(const ExecutorchMlxQuantizedMatmul* matrix);

// Whether executorch_mlx_quantized_matmul supports these parameters.
EXECUTORCH_MLX_BLAS_API bool executorch_mlx_supports_quantized(int bits, int group_size, int k);

// Like executorch_mlx_quantized_matmul, but rounds x to 8 bits: each group of a row has a scale of its own.
// simd/integers.h defines the results.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_int8_matmul(const ExecutorchMlxQuantizedMatmul* matmul);
// As executorch_mlx_quantized_matmuls.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_int8_matmuls(const ExecutorchMlxQuantizedMatmul* matmuls, int count);

// Like executorch_mlx_quantized_matmul, for the parameters that executorch_mlx_int8_matmul supports. Multiplies
// integers of 24 bits if x is float32, with errors about as small as those of float32. Multiplies integers of 16 bits
// if x is float16 or bfloat16, with errors below those of these dtypes. A row that these integers cannot represent is
// multiplied as executorch_mlx_quantized_matmul does: with an infinity, a NaN, or only tiny values in a group.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_integer_matmul(const ExecutorchMlxQuantizedMatmul* matmul);
// As executorch_mlx_quantized_matmuls.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_integer_matmuls(const ExecutorchMlxQuantizedMatmul* matmuls, int count);

// Whether executorch_mlx_integer_matmul supports these parameters and is faster than executorch_mlx_quantized_matmul.
EXECUTORCH_MLX_BLAS_API bool executorch_mlx_has_fast_integers(int bits, int group_size, int k);

// Packs w, scales and biases for the two functions above, which then need only the panels. The products of few rows
// get faster, and keep their bits. Writes executorch_mlx_integer_panels_size() bytes, which should begin at a cache
// line. Other fields than w, scales, biases, scale_type, bits, group_size, n and k are not read.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_pack_integer_panels(
    const ExecutorchMlxQuantizedMatmul* matrix, void* panels);
EXECUTORCH_MLX_BLAS_API size_t executorch_mlx_integer_panels_size(const ExecutorchMlxQuantizedMatmul* matrix);

// Whether executorch_mlx_int8_matmul supports these parameters.
EXECUTORCH_MLX_BLAS_API bool executorch_mlx_supports_int8(int bits, int group_size, int k);

// y [m, n] = x [m, k] @ w.T, where w [n, k] is float16 or bfloat16.
struct ExecutorchMlxHalfMatmul {
  const void* x;
  const uint16_t* w;
  executorch_mlx::FloatType type;  // of w
  int64_t row_stride;              // of w
  int64_t column_stride;           // of w
  int m;
  int n;
  int k;
  void* y;
  executorch_mlx::FloatType x_type;
  executorch_mlx::FloatType y_type;
  const float* panels;  // from executorch_mlx_pack_panels(), or null. w then has no gaps.
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_half_matmul(const ExecutorchMlxHalfMatmul* matmul);

// `count` products at once, which differ only in w, panels, n, y and y_type. column_stride is 1. Each result has the same
// bits as that of executorch_mlx_half_matmul.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_half_matmuls(const ExecutorchMlxHalfMatmul* matmuls, int count);

// -- operations that MLX's CPU backend composes of several others ---------------------------------

// y[i] = x[i] for i < count, rounded to the nearest value of `y_type`; ties to even. One of the types is float32.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_convert(
    const void* x, executorch_mlx::FloatType x_type, void* y, executorch_mlx::FloatType y_type, int64_t count);

// y[i] = a[i] + b[i % period], and likewise for the difference and the product, for i < count, a multiple of `period`.
// a, b and y have elements of `type`.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_add(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_subtract(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_multiply(
    const void* a, const void* b, executorch_mlx::FloatType type, void* y, int64_t count, int64_t period);

// y = exp(x), y = x / (1 + exp(-x)), y = 1 / (1 + exp(-x)) and y = tanh(x). x and y have elements of `type`.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_exp(
    const void* x, executorch_mlx::FloatType type, void* y, int64_t count);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_silu(
    const void* x, executorch_mlx::FloatType type, void* y, int64_t count);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_sigmoid(
    const void* x, executorch_mlx::FloatType type, void* y, int64_t count);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_tanh(
    const void* x, executorch_mlx::FloatType type, void* y, int64_t count);

// Computes the steps in order, for `rows` rows of elements of `type`, in the calling thread. A step may read the results
// of earlier steps.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_elementwise_steps(
    const executorch_mlx::ElementwiseStep* steps, int count, int64_t rows, executorch_mlx::FloatType type);

// y = x / sqrt(mean(x^2) + eps) * weight for each row of x [rows, width]. x and y have elements of `type`.
// weight [width] may be null.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_rms_norm(
    const void* x, executorch_mlx::FloatType type, const void* weight, executorch_mlx::FloatType weight_type, void* y,
    int64_t rows, int64_t width, float eps);

// A spatial axis of a convolution.
struct ExecutorchMlxWindowAxis {
  int64_t size;    // of x
  int64_t result;  // the number of positions of the window
  int64_t window;  // the number of elements of the window
  int64_t stride;
  int64_t padding;  // zeros before x
  int64_t dilation;
};

// The convolution y [batch, results..., groups * outputs] of x [batch, sizes..., groups * inputs] with w [groups *
// outputs, windows..., inputs], in two steps: executorch_mlx_pack_convolution() writes the weights in the order in which
// executorch_mlx_convolution() reads them, as executorch_mlx_convolution_weights() floats. Both steps must use the same
// kernels.
struct ExecutorchMlxConvolution {
  int64_t batch;
  int32_t groups;
  int32_t inputs;   // channels of x in a group
  int32_t outputs;  // channels of y in a group
  ExecutorchMlxWindowAxis axes[3];
};
EXECUTORCH_MLX_BLAS_API int64_t executorch_mlx_convolution_weights(const ExecutorchMlxConvolution* c);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_pack_convolution(
    const ExecutorchMlxConvolution* c, const float* w, float* packed);
EXECUTORCH_MLX_BLAS_API void executorch_mlx_convolution(
    const ExecutorchMlxConvolution* c, const float* x, const float* packed, float* y);

// An array [batch, heads, tokens, width] of any type but pairs, with any strides.
struct ExecutorchMlxHeads {
  const void* data;
  executorch_mlx::FloatType type;
  int64_t strides[4];
};

// Rotary position embedding of x [batch, heads, tokens, width]. Rotates the pairs (x[i], x[half + i]), i < half,
// by the angle (offset + token) * scale / periods[i], and copies the elements from x[2 * half] on. y has the type of x.
struct ExecutorchMlxRope {
  ExecutorchMlxHeads x;
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t width;
  int64_t half;
  const int32_t* offsets;    // one number, or one for each sequence of the batch
  bool offset_per_sequence;
  const float* periods;      // [half], or null for base^(i / half)
  float base;
  float scale;
  void* y;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_rope(const ExecutorchMlxRope* rope);

// softmax(scale * q @ k.T + mask) @ v for q [batch, heads, queries, width], k [batch, kv_heads, keys, width] and
// v [batch, kv_heads, keys, v_width]. heads / kv_heads consecutive heads of q share a head of k and v. At most one of
// the two masks is set. If a bool mask or `causal` hides all keys from a query, all keys have the same weight for this
// query, as in MLX. The result y [batch, queries, heads, v_width] has the heads of a query side by side, as the next
// product reads them. It has the type of q.
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
  int64_t v_width;
  bool causal;              // if true, the last query sees all keys, and each query one key less than the next one
  const bool* bool_mask;    // whether a query sees a key; may be null
  const float* float_mask;  // added to the scores; may be null
  int64_t mask_strides[4];
  float scale;
  void* y;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_attention(const ExecutorchMlxAttention* attention);

// `count` attentions at once. Each result has the same bits as that of executorch_mlx_attention.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_attentions(const ExecutorchMlxAttention* attentions, int count);

// -- quantized KV caches: custom_ops/quantized_cache.py defines the format ------------------------

// The parts of a quantized KV cache of one sequence. Strides count bytes of the entries, and elements of the scales. An
// entry has `groups` groups; its biases follow its scales.
struct ExecutorchMlxEntries {
  uint8_t* entries;
  int64_t entry_strides[2];  // between heads, and between entries
  void* scales;
  executorch_mlx::FloatType scale_type;
  int64_t scale_strides[2];
  int64_t groups;
  int bits;        // 4 or 8
  int group_size;  // 32, 64 or 128
  bool rotate;
};

// Quantizes x [heads, tokens, width], padded with zeros to whole groups, and writes it to the groups of the entries
// from `first_group` on. The first stride of x is not used.
struct ExecutorchMlxQuantizeEntries {
  ExecutorchMlxHeads x;
  int64_t heads;
  int64_t tokens;
  int64_t width;
  ExecutorchMlxEntries to;
  int64_t first_group;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_quantize_entries(const ExecutorchMlxQuantizeEntries* quantize);

// Attention of q [heads, queries, width] over `keys` entries. The keys are the first `width` numbers of an entry. The
// values are `value_size` numbers from group `value_group` on. The masks are as in ExecutorchMlxAttention, but each
// query sees at least one key. The result y [queries, heads, value_size] has the type of q. The first strides of q and
// of the mask are not used.
struct ExecutorchMlxQuantizedAttention {
  ExecutorchMlxHeads q;
  ExecutorchMlxEntries cache;
  int64_t heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t width;
  int64_t value_group;
  int64_t value_size;
  bool causal;
  const bool* bool_mask;
  const float* float_mask;
  int64_t mask_strides[4];
  float scale;
  void* y;
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_quantized_attention(const ExecutorchMlxQuantizedAttention* attention);

// -- recurrences over tokens -------------------------------------------------------------------------

// A vector of floats for each token and head, [batch, heads, tokens, width], with any strides.
struct ExecutorchMlxTokens {
  const float* data;
  int64_t strides[4];
};

// For each token: state = exp(decay) * state, then state += key ⊗ error, then y = query @ state. The error is the
// value, or beta * (value - key @ state) if there is beta. Consecutive heads share one of the `groups` queries and
// keys.
struct ExecutorchMlxGatedRecurrence {
  ExecutorchMlxTokens query;  // of `groups` heads, [size]
  ExecutorchMlxTokens key;    // of `groups` heads, [size]
  ExecutorchMlxTokens value;  // [columns]
  ExecutorchMlxTokens decay;  // [size] if `decays_by_channel`, else one number
  ExecutorchMlxTokens beta;   // one number; the data may be null
  bool decays_by_channel;
  int64_t batch;
  int64_t heads;
  int64_t groups;
  int64_t tokens;
  int64_t size;
  int64_t columns;
  const float* state;  // [batch, heads, size, columns]
  float* next;         // the state after the last token, like `state`
  bool is_transposed;  // both states are [batch, heads, columns, size]; then `size` is a multiple of 16
  float* y;            // [batch, tokens, heads, columns]
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_gated_recurrence(const ExecutorchMlxGatedRecurrence* recurrence);

// For each token and channel: state = exp(step * rates) * state + step * x * key, then y = state @ query. The second
// axis of the tokens has one index.
struct ExecutorchMlxSelectiveScan {
  ExecutorchMlxTokens x;      // [channels]
  ExecutorchMlxTokens step;   // [channels]
  ExecutorchMlxTokens key;    // [size]
  ExecutorchMlxTokens query;  // [size]
  const float* rates;         // [channels, size]
  int64_t batch;
  int64_t tokens;
  int64_t channels;
  int64_t size;
  const float* state;  // [batch, channels, size]
  float* next;         // the state after the last token
  float* y;            // [batch, tokens, channels]
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_selective_scan(const ExecutorchMlxSelectiveScan* scan);

// to[i] = from[i] for `rows` rows of `bytes` bytes. A null pointer in `from` stands for zeros.
EXECUTORCH_MLX_BLAS_API void executorch_mlx_copy_rows(const void* const* from, int64_t rows, int64_t bytes, void* to);

// -- sampling -------------------------------------------------------------------------------------

// A parameter of the sampler: one value, or one for each row.
struct ExecutorchMlxFloats {
  const float* data;
  bool per_row;
};
struct ExecutorchMlxIntegers {
  const int64_t* data;
  bool per_row;
};

// Draws a token from each row of logits [rows, vocabulary], contiguous, as custom_kernel_ops/sample.py defines. The
// data of top_k and min_p may be null.
struct ExecutorchMlxSample {
  const void* logits;
  executorch_mlx::FloatType type;  // of logits
  int64_t rows;
  int64_t vocabulary;
  ExecutorchMlxFloats temperature;
  ExecutorchMlxFloats top_p;
  ExecutorchMlxIntegers seed;
  ExecutorchMlxIntegers top_k;
  ExecutorchMlxFloats min_p;
  int64_t* tokens;  // [rows]
};
EXECUTORCH_MLX_BLAS_API void executorch_mlx_sample(const ExecutorchMlxSample* sample);

// -- tests ---------------------------------------------------------------------------------------

// Returns the number of calls so far of the functions for matrix products and convolutions above. Several products at
// once count as one call.
EXECUTORCH_MLX_BLAS_API uint64_t executorch_mlx_product_calls();

// Selects the kernels for an instruction set from now on. Returns false and changes nothing if this processor does not
// support it. Must not be called while kernels run.
EXECUTORCH_MLX_BLAS_API bool executorch_mlx_use_kernels(const char* name);

} // extern "C"
