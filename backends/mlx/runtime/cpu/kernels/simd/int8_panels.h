// Products of any number of rows of activations in 8 bits with a quantized matrix, as int8.h defines them. Part of
// kernels.cpp.
//
// A panel holds a part of kLanes rows of the matrix, as unsigned bytes: four integers of each row, then the next four
// of each row, and so on. Integers of 4 bits are unpacked eight at a time: the four with even indices, then the four
// with odd indices. quantize_row() writes the integers of x in the same order. A tile of results multiplies the panels
// by several rows of x.
#pragma once

#include "int8.h"
#include "panels.h"
#include "quantized.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kInt8Panels = 2;                            // panels that a tile multiplies at once
constexpr int kInt8Chunk = 8 * kMaxGroupSize;             // columns of the matrix in a panel
constexpr int kChunkGroups = kInt8Chunk / kMinGroupSize;  // the most groups in a row of a panel
#if defined(__AVX512F__)
constexpr int kInt8TileRows = 6;
#else
constexpr int kInt8TileRows = 3;
#endif

// kInt8Panels panels, with the scales and biases of each group.
struct Int8Panels {
  alignas(64) uint8_t bytes[kInt8Panels][kInt8Chunk * kLanes];
  alignas(64) float scales[kInt8Panels][kChunkGroups * kLanes];
  alignas(64) float biases[kInt8Panels][kChunkGroups * kLanes];
};

// Each block of four lanes of the result has two lanes of the same block of a and two of b: the first two of the block
// if `First` is 0, the last two if `First` is 2. Their order is a, b, a, b if `Width` is 1, and a, a, b, b if it is 2.
template <int Width, int First, int... I>
inline Ints interleave(Ints a, Ints b, Indices<I...>) {
  return __builtin_shufflevector(
      a, b, (I / 4 * 4 + First + (Width == 2 ? I % 2 : I % 4 / 2) + (I / Width % 2 ? kLanes : 0))...);
}

// Transposes the blocks of four lanes of four vectors: lane j of block b of v[i] becomes lane i of block b of v[j].
inline void transpose_in_blocks(Ints* v) {
  typedef typename MakeIndices<kLanes>::Type All;
  const Ints a = interleave<1, 0>(v[0], v[1], All{});
  const Ints b = interleave<1, 2>(v[0], v[1], All{});
  const Ints c = interleave<1, 0>(v[2], v[3], All{});
  const Ints d = interleave<1, 2>(v[2], v[3], All{});
  v[0] = interleave<2, 0>(a, c, All{});
  v[1] = interleave<2, 2>(a, c, All{});
  v[2] = interleave<2, 0>(b, d, All{});
  v[3] = interleave<2, 2>(b, d, All{});
}

// Loads four words of every fourth row. Block b of the result has the words of row First + 4 * b. row(Constant<r>{})
// points to the words of row r.
template <int First, typename Row>
__attribute__((always_inline)) inline Ints load_blocks(Row&& row) {
#if defined(__AVX512F__)
  const auto load_block = [&](auto r) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row(r)));
  };
  __m512i v = _mm512_castsi128_si512(load_block(Constant<First>{}));
  v = _mm512_mask_broadcast_i32x4(v, 0x00f0, load_block(Constant<First + 4>{}));
  v = _mm512_mask_broadcast_i32x4(v, 0x0f00, load_block(Constant<First + 8>{}));
  return (Ints)_mm512_mask_broadcast_i32x4(v, 0xf000, load_block(Constant<First + 12>{}));
#else
  Ints v;
  __builtin_memcpy(&v, row(Constant<First>{}), 16);
  __builtin_memcpy(reinterpret_cast<char*>(&v) + 16, row(Constant<First + 4>{}), 16);
  return v;
#endif
}

// Writes `groups` floats of kLanes rows to `to`, transposed: kLanes floats for each group. row(Constant<r>{}) points to
// row r. Reads and writes up to three more groups if their number is not a multiple of four.
template <typename Row>
void transpose_rows(Row&& row, int groups, float* to) {
  for (int i = 0; i < groups; i += 4) {
    const auto from = [&](auto r) __attribute__((always_inline)) { return row(r) + i; };
    Ints v[4] = {load_blocks<0>(from), load_blocks<1>(from), load_blocks<2>(from), load_blocks<3>(from)};
    transpose_in_blocks(v);
    for (int j = 0; j < 4; ++j) {
      store((Floats)v[j], to + (i + j) * kLanes);
    }
  }
}

// Writes the scales of kLanes rows to `to`, transposed, in float32. The rows begin at scales[first] and have the
// distance `stride`. Row `last` takes the place of the rows after it.
void transpose_scales(
    const void* scales, FloatType type, ptrdiff_t first, ptrdiff_t stride, int last, int groups, float* to) {
  if (type == FloatType::float32 && groups % 4 == 0 && last >= kLanes - 1) {
    const float* from = static_cast<const float*>(scales) + first;
    return transpose_rows(
        [=](auto r) __attribute__((always_inline)) { return from + r.value * stride; }, groups, to);
  }
  alignas(64) float rows[kLanes][kChunkGroups];
  for (int r = 0; r < kLanes; ++r) {
    const ptrdiff_t index = first + (r < last ? r : last) * stride;
    if (type == FloatType::float32) {
      __builtin_memcpy(rows[r], static_cast<const float*>(scales) + index, groups * sizeof(float));
    } else {
      widen(static_cast<const uint16_t*>(scales) + index, type, 1, rows[r], groups);
    }
  }
  transpose_rows([&](auto r) __attribute__((always_inline)) { return rows[r.value]; }, groups, to);
}

// Prefetches the scales and biases of kLanes rows.
inline void prefetch_scales(const QuantizedMatrix& q, ptrdiff_t first) {
  const ptrdiff_t size = static_cast<ptrdiff_t>(q.k / q.group_size) * (q.scale_type == FloatType::float32 ? 4 : 2);
  prefetch(static_cast<const char*>(q.scales) + first * size, kLanes * size);
  prefetch(static_cast<const char*>(q.biases) + first * size, kLanes * size);
}

// Writes the first `words` words of kLanes rows to a panel. `words` is a multiple of four. row(Constant<r>{}) points to
// row r. Prefetches as many words of the rows at `next`, which have the distance `stride`.
template <int Bits, typename Row>
void unpack_rows(Row&& row, int words, const uint32_t* next, ptrdiff_t stride, uint8_t* panel) {
  for (int i = 0; i < words; i += 4) {
    if (i % 16 == 0) {
      for (int r = 0; r < kLanes; ++r) {
        __builtin_prefetch(next + r * stride + i);
      }
    }
    const auto from = [&](auto r) __attribute__((always_inline)) { return row(r) + i; };
    Ints v[4] = {load_blocks<0>(from), load_blocks<1>(from), load_blocks<2>(from), load_blocks<3>(from)};
    transpose_in_blocks(v);
    for (int j = 0; j < 4; ++j) {
      const Words word = (Words)v[j];
      if constexpr (Bits == 4) {
        store((Floats)(word & 0x0f0f0f0fu), reinterpret_cast<float*>(panel));
        store((Floats)(word >> 4 & 0x0f0f0f0fu), reinterpret_cast<float*>(panel) + kLanes);
        panel += 8 * kLanes;
      } else {
        store((Floats)word, reinterpret_cast<float*>(panel));
        panel += 4 * kLanes;
      }
    }
  }
}

// Calls unpack_rows() for the rows at `from`, which have the distance `stride`. Row `last` takes the place of the rows
// after it.
template <int Bits>
void unpack_panel(const uint32_t* from, ptrdiff_t stride, int last, int words, const uint32_t* next, uint8_t* panel) {
  if (last >= kLanes - 1) {
    const auto row = [=](auto r) __attribute__((always_inline)) { return from + r.value * stride; };
    return unpack_rows<Bits>(row, words, next, stride, panel);
  }
  const auto row = [=](auto r) __attribute__((always_inline)) {
    return from + (r.value < last ? r.value : last) * stride;
  };
  unpack_rows<Bits>(row, words, next, stride, panel);
}

// -- products -------------------------------------------------------------------------------------

// Computes the products of M rows of x with `groups` groups of P panels. Writes them to y if `is_first`, else adds
// them.
template <int M, int P>
void int8_tile(
    const Int8Rows& x, int row, int group, int groups, int size, const Int8Panels& w, bool is_first, float* y,
    ptrdiff_t ldy, int columns) {
  // A dot product is computed as several sums, because their instructions do not wait for each other.
  constexpr int Parts = M * P >= 6 ? 1 : M * P >= 3 ? 2 : 4;
  const int8_t* integers[M];
  Floats acc[M][P];
  for (int r = 0; r < M; ++r) {
    integers[r] = x.integers + (row + r) * x.stride + static_cast<ptrdiff_t>(group) * size;
    for (int p = 0; p < P; ++p) {
      const int count = columns - p * kLanes < kLanes ? columns - p * kLanes : kLanes;
      acc[r][p] = is_first ? Floats{} : load_partial<Floats>(y + r * ldy + p * kLanes, count);
    }
  }
  ptrdiff_t offset = 0;  // in a row of the chunk
  for (int g = 0; g < groups; ++g) {
    Ints dots[Parts][M][P] = {};
    for (int i = 0; i < size; i += 4 * Parts) {
      repeat<Parts>([&](auto part) __attribute__((always_inline)) {
        Words weights[P];
        repeat<P>([&](auto p) __attribute__((always_inline)) {
          weights[p.value] = load<Words>(w.bytes[p.value] + (offset + 4 * part.value) * kLanes);
        });
        repeat<M>([&](auto r) __attribute__((always_inline)) {
          const FourBytes bytes = four_bytes(load<int32_t>(integers[r.value] + offset + 4 * part.value) - Ints{});
          repeat<P>([&](auto p) __attribute__((always_inline)) {
            auto& dot = dots[part.value][r.value][p.value];
            dot = add_products(dot, weights[p.value], bytes);
          });
        });
      });
      offset += 4 * Parts;
    }
    repeat<M>([&](auto r) __attribute__((always_inline)) {
      const ptrdiff_t index = (row + r.value) * static_cast<ptrdiff_t>(x.groups) + group + g;
      const Floats scale = broadcast(x.scales[index]);
      const Floats sum = broadcast(x.sums[index]);
      repeat<P>([&](auto p) __attribute__((always_inline)) {
        Ints dot = dots[0][r.value][p.value];
        for (int part = 1; part < Parts; ++part) {
          dot += dots[part][r.value][p.value];
        }
        Floats& total = acc[r.value][p.value];
        const Floats factor = load<Floats>(w.scales[p.value] + g * kLanes) * scale;
        total = fused_multiply_add(factor, __builtin_convertvector(dot, Floats), total);
        total = fused_multiply_add(load<Floats>(w.biases[p.value] + g * kLanes), sum, total);
      });
    });
  }
  for (int r = 0; r < M; ++r) {
    for (int p = 0; p < P; ++p) {
      const int count = columns - p * kLanes < kLanes ? columns - p * kLanes : kLanes;
      store_partial(acc[r][p], y + r * ldy + p * kLanes, count);
    }
  }
}

template <int Bits, int P>
void multiply_int8_panels(
    const QuantizedMatrix& q, const Int8Rows& x, int m, int first, int columns, float* y, ptrdiff_t ldy) {
  Int8Panels panels;
  for (int p = 0; p < P; ++p) {
    prefetch_scales(q, first + (P + p) * kLanes);
  }
  const ptrdiff_t words = static_cast<ptrdiff_t>(q.k) * Bits / 32;
  for (int column = 0; column < q.k; column += kInt8Chunk) {
    const int length = q.k - column < kInt8Chunk ? q.k - column : kInt8Chunk;
    const int groups = length / q.group_size;
    const int group = column / q.group_size;
    const bool is_last = column + length == q.k;
    for (int p = 0; p < P; ++p) {
      const ptrdiff_t row = first + p * kLanes;
      const int last = columns - p * kLanes - 1;
      const uint32_t* from = q.w + row * words + column * Bits / 32;
      const uint32_t* next = is_last ? q.w + (row + P * kLanes) * words : from + length * Bits / 32;
      unpack_panel<Bits>(from, words, last, length * Bits / 32, next, panels.bytes[p]);
      transpose_scales(q.scales, q.scale_type, row * x.groups + group, x.groups, last, groups, panels.scales[p]);
      transpose_scales(q.biases, q.scale_type, row * x.groups + group, x.groups, last, groups, panels.biases[p]);
    }
    for_row_tiles<kInt8TileRows>(m, [&](auto rows, int row) {
      int8_tile<decltype(rows)::value, P>(
          x, row, group, groups, q.group_size, panels, column == 0, y + row * ldy + first, ldy, columns);
    });
  }
}

template <int Bits>
void multiply_many_int8(
    const QuantizedMatrix& q, const Int8Rows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  constexpr int step = kInt8Panels * kLanes;
  for (int column = first; column < last; column += step) {
    const int columns = last - column < step ? last - column : step;
    columns > kLanes ? multiply_int8_panels<Bits, 2>(q, x, m, column, columns, y, ldy)
                     : multiply_int8_panels<Bits, 1>(q, x, m, column, columns, y, ldy);
  }
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
