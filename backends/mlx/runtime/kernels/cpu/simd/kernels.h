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

struct Kernels {
  // Whether dot_rows, multiply_panels and multiply_columns accept bfloat16_pair. Then x also consists of pairs, and k
  // and the distances between rows count pairs. A product of pairs is rounded once, to float32; subnormal numbers count
  // as zeros.
  bool multiplies_bfloat16_pairs;
  // Whether multiply_integers is faster than quantized_rows and multiply_panels for float activations.
  bool has_fast_integers;
  int panel_rows;
  int panels_from_rows; // of x, from which on multiply_panels is faster than dot_rows in spite of the packing
  int float_panel_rows;

#define KERNEL(result, name, ...) result (*name)(__VA_ARGS__);
#include "kernels.inc"
#undef KERNEL

  // The two functions of tiles.cpp for floats. Null without AMX.
  //
  // y [m, n] = x [m, k] @ w.T for bfloat16 x and w [n, k], k a multiple of 2. Tiles of kTileRows rows of x follow each
  // other, transposed: [pairs, kTileRows], with zeros up to a multiple of kTileRows pairs.
  void (*multiply_tiles)(
      const float* x, int m, const uint16_t* w, ptrdiff_t ldw, int n, int k, float* y, ptrdiff_t ldy) = nullptr;
  // y [m, n] = weights [m, k] @ values [k, n], or += if `accumulate`, for bfloat16 values, m <= kMaxTileValueRows,
  // k <= kMaxTileValues, and n a multiple of kTileRows. If m is more than kTileRows, also writes the rows from m up to
  // the next multiple of kTileRows, with any values. If sums continue in a later call, k is a multiple of 32.
  void (*multiply_value_tiles)(const float* weights, ptrdiff_t ldw, int m, const uint16_t* values, ptrdiff_t ldv, int n,
      int k, bool accumulate, float* y, ptrdiff_t ldy) = nullptr;
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
