// The inner loops of the kernels: single-threaded, and compiled once per instruction set by kernels.cpp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "elementwise_type.h"
#include "float_type.h"

namespace executorch_mlx {

// Limits and tile sizes of the functions below.
constexpr int kMaxQuantizedRows = 8; // rows of x in one call of quantized_rows
constexpr int kMaxTransposedRows = 4; // rows of x in a tile of multiply_transposed
constexpr int kMaxGroups = 1024; // groups in a row of a QuantizedMatrix
constexpr int kIntegerPanelRows = 16; // rows of the matrix in a panel of IntegerPanels
constexpr int kRecurrentPanel = 48; // columns in a panel of the weights of a recurrent layer
constexpr int kLogitBlock = 512; // logits of which widen_logits computes one maximum
constexpr int kPanelsTogether = 3; // panels that multiply_panels and multiply_streamed_panels read at a time
constexpr int kMaxStreamedRows = 8; // of x in one call of multiply_streamed_panels
constexpr int kTileRows = 16; // rows of a tile of multiply_tiles
constexpr int kMaxTileValueRows = 64; // rows of weights in one call of multiply_value_tiles
constexpr int kMaxTileValues = 128; // values of a column in one call of multiply_value_tiles

// An [n, k] matrix in MLX's affine packing, contiguous.
struct QuantizedMatrix {
  const uint32_t* w; // [n, k * bits / 32]
  const void* scales; // [n, k / group_size]
  const void* biases; // [n, k / group_size]
  FloatType scale_type; // of scales and biases
  int bits; // 2, 4 or 8
  int group_size; // 32, 64 or 128
  int k;
};

// Entries of a quantized KV cache, or some of the groups of each entry.
struct QuantizedEntries {
  const uint8_t* entries;
  ptrdiff_t entry_stride; // from one entry to the next, in bytes
  const void* scales;
  FloatType scale_type; // of scales and biases
  ptrdiff_t scale_stride; // from the scales of one entry to those of the next, in elements
  ptrdiff_t bias_offset; // from the scales of an entry to its biases, in elements
  int bits; // 4 or 8
  int group_size; // 32, 64 or 128
  int groups; // of an entry, at most kMaxGroups
  // The bytes to prefetch of each later entry, from the first of these groups on. 0: prefetches neither these nor the
  // scales.
  int prefetched_bytes;
};

// Rows of activations as integers, in groups like those of a QuantizedMatrix: value = scale * integer. simd/integers.h
// defines the integers and their digits.
struct IntegerRows {
  int8_t* integers; // [rows, digits], each with the digits of a row as round_row writes them
  ptrdiff_t stride; // in bytes: from one digit of a row to the next, and from the last digit to the next row
  float* scales; // [rows, groups]
  float* sums; // [rows, groups]: scale * (the sum of the integers of the group)
  int groups;
  int digits; // 1 for activations in 8 bits, 2 for half precision, 3 for float32
};

// A QuantizedMatrix of 4 or 8 bits, packed for products with IntegerRows. A panel holds kIntegerPanelRows rows, one
// group after the other. A group has the first word of each row, then the second word of each row, and so on, and after
// the words the scales and then the biases of the rows. After the last row of the matrix, the scales
// and biases of the last panel are zeros.
struct IntegerPanels {
  const char* data;
  ptrdiff_t panel_bytes;
  ptrdiff_t group_bytes; // of a group of a panel
  int words; // of a group of a row
  int groups;
  int bits;
  FloatType scale_type; // of scales and biases
};

// A vector for each token. Distances count elements: from one token to the next, and between the elements of a vector.
struct TokenVectors {
  const float* data;
  ptrdiff_t token_stride;
  ptrdiff_t stride;
};

// Some columns of the state [size, columns] of a head, and its tokens: see kernel::GatedRecurrence.
struct GatedRecurrence {
  TokenVectors query; // [size]
  TokenVectors key; // [size]
  TokenVectors value; // [columns]
  TokenVectors decay; // [size] if `decays_by_channel`, else one number
  TokenVectors beta; // one number; null for gated linear attention
  bool decays_by_channel;
  const float* state; // before the tokens, of which there is at least one
  ptrdiff_t state_stride; // between rows
  float* next; // the state after the tokens; may be the same memory
  ptrdiff_t next_stride;
  float* y; // [tokens, columns]
  ptrdiff_t y_stride;
  int tokens;
  int size;
  int columns;
  float* scratch; // 8 * size floats
};

// Some channels of a selective scan: see kernel::SelectiveScan.
struct SelectiveScan {
  TokenVectors x; // [channels]
  TokenVectors step; // [channels]
  TokenVectors key; // [size]
  TokenVectors query; // [size]
  const float* rates; // [channels, size]
  const float* state; // [channels, size]
  float* next; // [channels, size]; may be the same memory as the state
  float* y; // [tokens, channels]
  ptrdiff_t y_stride;
  int tokens;
  int channels; // at most scan_channels()
  int size;
  float* scratch; // 2 * (size + 16) floats
};

// The elements of the window of a convolution in groups. Each has a source in x, and weights [inputs, channels of y].
struct WindowElements {
  const float* const* sources;
  const float* const* weights;
  int count;
  int inputs; // channels of x in a group, at most `outputs`
  int outputs; // channels of y in a group: a divisor of the number of lanes
};

// What a product does with its totals, and where it writes the results y: alpha * total + beta * old value + addend,
// then the activation, then + residual. The old value is not read if beta is 0. addend and residual may be null. The
// rows of the residual have the distance ldy.
struct FloatResults {
  float* y;
  ptrdiff_t ldy;
  float alpha;
  float beta;
  const float* addend;
  ptrdiff_t ld_addend;
  Elementwise activation; // gelu, gelu_tanh, silu, maximum with 0, or copy: none
  const float* residual;
};

// The functions that are compiled for one instruction set. ldx, ldw, ldb, ldy and ldo are the distances between rows,
// in elements.
struct Kernels {
  // Whether dot_rows, multiply_panels and multiply_columns accept bfloat16_pair. Then x also consists of pairs, and k
  // and the distances between rows count pairs. A product of pairs is rounded once, to float32; subnormal numbers count
  // as zeros.
  bool multiplies_bfloat16_pairs;

  // y [m, n] = alpha * x [m, k] @ w.T + beta * y, where w [n, k] has elements of `type`. y is not read if beta is 0.
  void (*dot_rows)(const float* x, ptrdiff_t ldx, int m, const void* w, FloatType type, ptrdiff_t ldw, int n, int k,
      float alpha, float beta, float* y, ptrdiff_t ldy);

  // Up to `panel_rows` rows of a matrix make a panel, of panel_size(k) floats. pack_panel() writes the panel of `rows`
  // rows of x [rows, k].
  int panel_rows;
  int panels_from_rows; // of x, from which on multiply_panels is faster than dot_rows in spite of the packing
  size_t (*panel_size)(int k);
  void (*pack_panel)(const float* x, ptrdiff_t ldx, int rows, int k, float* panel);
  // Like dot_rows, for x and w in consecutive panels. `type` is float32 or bfloat16_pair. y has elements of y_type, as
  // from narrow; beta is 0 unless y_type is float32. Meanwhile prefetches `ahead_bytes` bytes of other memory, from
  // `ahead` on.
  void (*multiply_panels)(FloatType type, const float* x, int m, const float* w, int n, int k, float alpha, float beta,
      void* y, FloatType y_type, ptrdiff_t ldy, const char* ahead, ptrdiff_t ahead_bytes);

  // Like multiply_panels, for up to kMaxStreamedRows rows of x, which wait for w to come from memory. x is not in
  // panels: its rows have zeros up to a multiple of panel_rows.
  void (*multiply_streamed_panels)(FloatType type, const float* x, ptrdiff_t ldx, int m, const float* w, int n, int k,
      float alpha, float beta, void* y, FloatType y_type, ptrdiff_t ldy);

  // Products of float32 rows: float_panels.h. Up to `float_panel_rows` rows of w make a panel, of k * rows floats,
  // where rows is rounded up to whole vectors: a divisor of float_panel_rows times 1, 2 or 3. multiply_float_panel()
  // computes the columns of one panel for x [m, k]. Meanwhile it prefetches another panel, unless `ahead` is null.
  int float_panel_rows;
  void (*pack_float_panel)(const float* w, ptrdiff_t ldw, int rows, int k, float* panel);
  void (*multiply_float_panel)(const float* x, ptrdiff_t ldx, int m, const float* w, int columns, int k,
      const FloatResults& results, const float* ahead);
  // Makes results of totals [rows, columns].
  void (*finish_float_results)(const float* totals, ptrdiff_t ld, int rows, int columns, const FloatResults& results);

  // y [m, n] = x [m, k] @ w.T for bfloat16 x and w [n, k], k a multiple of 2. tiles.cpp defines the results. Tiles of
  // kTileRows rows of x follow each other, transposed: [pairs, kTileRows], with zeros up to a multiple of kTileRows
  // pairs. Null without AMX.
  void (*multiply_tiles)(
      const float* x, int m, const uint16_t* w, ptrdiff_t ldw, int n, int k, float* y, ptrdiff_t ldy);
  // y [m, n] = weights [m, k] @ values [k, n], or += if `accumulate`, for bfloat16 values, m <= kMaxTileValueRows,
  // k <= kMaxTileValues, and n a multiple of kTileRows. If m is more than kTileRows, also writes the rows from m up to
  // the next multiple of kTileRows, with any values. If sums continue in a later call, k is a multiple of 32. Null
  // without AMX.
  void (*multiply_value_tiles)(const float* weights, ptrdiff_t ldw, int m, const uint16_t* values, ptrdiff_t ldv, int n,
      int k, bool accumulate, float* y, ptrdiff_t ldy);

  // y [m, n] = x [m, k] @ b [k, n], or += if `accumulate`. b has elements of `type`. Then adds `addend` [m, n], with
  // the distance lda between rows, unless it is null.
  void (*multiply_columns)(const float* x, ptrdiff_t ldx, int m, const void* b, FloatType type, ptrdiff_t ldb, int n,
      int k, bool accumulate, const float* addend, ptrdiff_t lda, float* y, ptrdiff_t ldy);
  // The number of columns that multiply_columns computes together for this number of rows of x.
  int (*column_panel_width)(int rows);
  // Like multiply_columns for float32, with n <= kRecurrentPanel columns that follow each other without gaps.
  void (*multiply_recurrent_panel)(const float* x, ptrdiff_t ldx, int m, const float* b, int n, int k,
      const float* addend, ptrdiff_t lda, float* y, ptrdiff_t ldy);

  // y [k, n] = x.T for x [n, k] with elements of `type`. y has float32 elements, or pairs if x has. Also writes the
  // columns from n up to the next multiple of 16, with any values; ldy is at least this multiple.
  void (*transpose)(const void* x, FloatType type, ptrdiff_t ldx, int n, int k, float* y, ptrdiff_t ldy);

  // y [m, n] = x [m, k] @ w.T for w [n, k] with elements of `type`: multiply_columns with the result of transpose, bit
  // for bit. Faster for up to kMaxTransposedRows rows of x.
  void (*multiply_transposed)(const float* x, ptrdiff_t ldx, int m, const void* w, FloatType type, ptrdiff_t ldw, int n,
      int k, float* y, ptrdiff_t ldy);

  // Prepares one row x [k] for quantized_rows: writes its elements to `arranged` [k], in the order in which
  // quantized_rows unpacks the weights.
  void (*arrange_for_quantized)(const float* x, const QuantizedMatrix& q, float* arranged);
  // Computes columns [first, last) of y [m, n] = x [m, k] @ q.T for up to kMaxQuantizedRows rows. `arranged` contains
  // what `arrange_for_quantized` wrote for each of the m rows of x, with the distance ldx between rows.
  void (*quantized_rows)(const QuantizedMatrix& q, const float* arranged, ptrdiff_t ldx, int m, int first, int last,
      float* y, ptrdiff_t ldy);
  // Writes rows [first, last) of the matrix to `out`, in float32.
  void (*dequantize_rows)(const QuantizedMatrix& q, int first, int last, float* out, ptrdiff_t ldo);
  // The same as pack_panel for the rows first ... first + rows - 1 of the matrix in float32.
  void (*pack_quantized_panel)(const QuantizedMatrix& q, int first, int rows, float* panel);
  // Writes the first `count` entries to the rows of `out`, in float32.
  void (*dequantize_entries)(const QuantizedEntries& e, int count, float* out, ptrdiff_t ldo);

  // Whether multiply_integers is faster than quantized_rows and multiply_panels for float activations.
  bool has_fast_integers;
  // The bytes of an integer of IntegerRows, if the matrix has this number of bits.
  int (*bytes_of_integer)(int bits);
  // Writes one row x [k] to row `row` of `rows`. A group that the digits cannot represent gets the scale NaN, or 0 if
  // it is tiny: returns false if there are such groups.
  bool (*round_row)(const float* x, const QuantizedMatrix& q, const IntegerRows& rows, ptrdiff_t row);
  // Computes columns [first, last) of y [m, n] = x [m, k] @ q.T for the matrix q in `panels`. `first` is a multiple of
  // kIntegerPanelRows.
  void (*multiply_integers)(
      const IntegerPanels& panels, const IntegerRows& x, int m, int first, int last, float* y, ptrdiff_t ldy);

  // y[i] = x[i * stride] for i < count. Converts from `type`, float16 or bfloat16, to float32.
  void (*widen)(const uint16_t* x, FloatType type, ptrdiff_t stride, float* y, ptrdiff_t count);
  // y[i] = x[i] for i < count. Rounds float32 to the nearest value of `type`, float16 or bfloat16; ties to even.
  void (*narrow)(const float* x, FloatType type, uint16_t* y, ptrdiff_t count);

  // y = a + b, y = a - b, y = a * b and y = max(a, b), element by element. The maximum of a NaN and any number is NaN.
  // These functions and the next ones read and write elements of `type`, which is float32, float16 or bfloat16, and
  // compute in float32.
  void (*add)(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count);
  void (*subtract)(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count);
  void (*multiply)(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count);
  void (*maximum)(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count);
  // y = exp(x), y = x / (1 + exp(-x)), y = 1 / (1 + exp(-x)), y = tanh(x), GELU, its approximation by tanh, and y =
  // erf(x).
  void (*exponential)(const void* x, FloatType type, void* y, ptrdiff_t count);
  void (*silu)(const void* x, FloatType type, void* y, ptrdiff_t count);
  void (*sigmoid)(const void* x, FloatType type, void* y, ptrdiff_t count);
  void (*tanh)(const void* x, FloatType type, void* y, ptrdiff_t count);
  void (*gelu)(const void* x, FloatType type, void* y, ptrdiff_t count);
  void (*gelu_tanh)(const void* x, FloatType type, void* y, ptrdiff_t count);
  void (*erf)(const void* x, FloatType type, void* y, ptrdiff_t count);
  // y = x / sqrt(mean(x^2) + eps) * weight for each row of x [rows, width]. weight may be null.
  void (*rms_norm)(
      const void* x, FloatType type, const float* weight, void* y, ptrdiff_t rows, ptrdiff_t width, float eps);
  // y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias for each row of x [rows, width]. weight and
  // bias may be null.
  void (*layer_norm)(const void* x, FloatType type, const float* weight, const float* bias, void* y, ptrdiff_t rows,
      ptrdiff_t width, float eps);
  // Rotates the pairs (x[i], x[half + i]), i < half, by angles with these cosines and sines.
  void (*rotate)(const void* x, FloatType type, const float* cosines, const float* sines, void* y, ptrdiff_t half);
  // y = factor * x, with elements of `type`.
  void (*scale)(const float* x, float factor, FloatType type, void* y, ptrdiff_t count);
  // Replaces x by exp(scale * x - max(scale * x)), in place. Returns the sum of the new values. Further elements of
  // minus infinity would change neither the values nor the sum, if scale is positive.
  float (*softmax_numerators)(float* x, ptrdiff_t count, float scale);
  bool (*has_nan)(const float* x, ptrdiff_t count);
  // Replaces x[i] by scale * x[i] where the mask is true, and else by minus infinity. Returns whether it is true
  // anywhere.
  bool (*hide_scores)(float* x, const bool* mask, ptrdiff_t count, float scale);

  // Recurrences over tokens. recurrence_columns() returns the number of columns of the state of which
  // gated_recurrence() should run a multiple at once, and scan_channels() the largest number of channels for
  // selective_scan().
  int (*recurrence_columns)(int tokens);
  void (*gated_recurrence)(const GatedRecurrence& r);
  int (*scan_channels)();
  void (*selective_scan)(const SelectiveScan& s);

  // Writes the logits x [count] to y in float32, with minus infinity in place of NaN, and the maximum of each block of
  // kLogitBlock logits to block_maxima.
  void (*widen_logits)(const void* x, FloatType type, ptrdiff_t count, float* y, float* block_maxima);
  // The sum of 2^((maximum - y[i]) * scale) for i < count. scale is negative, and no y[i] is above the maximum.
  double (*sum_probability_weights)(const float* y, ptrdiff_t count, float maximum, float scale);
  // Threefry-2x32: low[i] and high[i] are the output words of the counters (first + i, second + i), i < count.
  void (*random_words)(
      uint32_t key0, uint32_t key1, uint32_t first, uint32_t second, ptrdiff_t count, uint32_t* low, uint32_t* high);

  // y [positions, channels]: y[p, c] is the sum of sources[e][p * step + c / outputs * inputs + i] * weights[e][i, c]
  // over the elements e of the window and the inputs i of a group, in ascending order.
  void (*convolve_small_groups)(const WindowElements& window, ptrdiff_t step, float* y, int positions, int channels);
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace avx512_bf16 { // avx512 with BF16 and VNNI
extern const Kernels kernels;
}
namespace dotprod {
extern const Kernels kernels;
}
namespace i8mm { // dotprod with I8MM and BF16
extern const Kernels kernels;
}

namespace amx { // functions for avx512_bf16::kernels on a processor with AMX: see tiles.cpp
void multiply_tiles(const float* x, int m, const uint16_t* w, ptrdiff_t ldw, int n, int k, float* y, ptrdiff_t ldy);
void multiply_value_tiles(const float* weights, ptrdiff_t ldw, int m, const uint16_t* values, ptrdiff_t ldv, int n,
    int k, bool accumulate, float* y, ptrdiff_t ldy);
// Like multiply_integers, for at least kTileRows rows of x.
void multiply_integer_tiles(
    const IntegerPanels& panels, const IntegerRows& x, int m, int first, int last, float* y, ptrdiff_t ldy);
} // namespace amx

// The kernels for the best instruction set of this processor, or for the one that the environment variable
// EXECUTORCH_MLX_CPU_KERNELS or kernel::use_instruction_set() has chosen.
const Kernels& kernels();

} // namespace executorch_mlx
