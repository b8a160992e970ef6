// Products of rows of activations in 8 bits with a quantized matrix, as int8.h defines them. Part of kernels.cpp.
//
// The matrix is packed in panels, see Int8Panels in kernels.h. A tile of results multiplies several rows of x by a few
// blocks: kLanes rows of the matrix, a panel or half of one.
#pragma once

#include "int8.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kInt8Blocks = 2;  // blocks that a tile multiplies at once
#if defined(__AVX512F__)
constexpr int kInt8TileRows = 8;
#else
constexpr int kInt8TileRows = 3;
#endif

// Loads kLanes scales or biases in float32.
inline Floats load_scales(const char* from, FloatType type) {
  switch (type) {
    case FloatType::float16:
      return Elements<FloatType::float16>::load_all(reinterpret_cast<const uint16_t*>(from));
    case FloatType::bfloat16:
      return Elements<FloatType::bfloat16>::load_all(reinterpret_cast<const uint16_t*>(from));
    default:
      return load<Floats>(from);
  }
}

// The vectors of integers in a vector of words: four integers in each lane.
template <int Bits, int Quad>
inline Words integers_of(Words words) {
  return Bits == 8 ? words : words >> 4 * Quad & 0x0f0f0f0fu;
}

// Computes the products of M rows of x, from `row` on, with B blocks, from `block` on. Writes up to `columns` columns.
template <int Bits, int M, int B>
void int8_tile(
    const Int8Panels& panels, int block, const Int8Rows& x, int row, float* y, ptrdiff_t ldy, int columns) {
  constexpr int Quads = 8 / Bits;  // vectors of integers in a vector of words
  // A dot product is computed as several sums, because their instructions do not wait for each other.
  constexpr int Parts = M * B >= 4 ? 1 : 2;
  const Int8Panels p = panels;
  const ptrdiff_t scale_size = p.scale_type == FloatType::float32 ? 4 : 2;
  const int8_t* integers[M];
  const char* groups[B];  // the present group of the panel of each block
  int lanes[B];           // the first row of the block in its panel
  for (int r = 0; r < M; ++r) {
    integers[r] = x.integers + (row + r) * x.stride;
  }
  for (int b = 0; b < B; ++b) {
    const ptrdiff_t first = static_cast<ptrdiff_t>(block + b) * kLanes;
    groups[b] = p.data + first / kInt8PanelRows * p.panel_bytes;
    lanes[b] = first % kInt8PanelRows;
  }
  Floats acc[M][B] = {};
  for (int g = 0; g < p.groups; ++g) {
    Ints dots[Parts][M][B] = {};
    for (int i = 0; i < p.words; i += Parts) {
      repeat<Parts>([&](auto part) __attribute__((always_inline)) {
        Words words[B];
        repeat<B>([&](auto b) __attribute__((always_inline)) {
          const char* from = groups[b.value] + ((i + part.value) * kInt8PanelRows + lanes[b.value]) * 4;
          prefetch(from + kPrefetchDistance);
          words[b.value] = load<Words>(from);
        });
        repeat<Quads>([&](auto quad) __attribute__((always_inline)) {
          repeat<M>([&](auto r) __attribute__((always_inline)) {
            const auto* from = integers[r.value] + ((i + part.value) * Quads + quad.value) * 4;
            const FourBytes four = four_bytes(load<int32_t>(from) - Ints{});
            repeat<B>([&](auto b) __attribute__((always_inline)) {
              auto& dot = dots[part.value][r.value][b.value];
              dot = add_products(dot, integers_of<Bits, decltype(quad)::value>(words[b.value]), four);
            });
          });
        });
      });
    }
    repeat<B>([&](auto b) __attribute__((always_inline)) {
      const char* from = groups[b.value] + p.words * kInt8PanelRows * 4 + lanes[b.value] * scale_size;
      const Floats scale = load_scales(from, p.scale_type);
      const Floats bias = load_scales(from + kInt8PanelRows * scale_size, p.scale_type);
      repeat<M>([&](auto r) __attribute__((always_inline)) {
        const ptrdiff_t index = (row + r.value) * static_cast<ptrdiff_t>(x.groups) + g;
        Ints dot = dots[0][r.value][b.value];
        for (int part = 1; part < Parts; ++part) {
          dot += dots[part][r.value][b.value];
        }
        Floats& total = acc[r.value][b.value];
        const Floats factor = scale * broadcast(x.scales[index]);
        total = fused_multiply_add(factor, __builtin_convertvector(dot, Floats), total);
        total = fused_multiply_add(bias, broadcast(x.sums[index]), total);
      });
      groups[b.value] += p.group_bytes;
    });
    for (int r = 0; r < M; ++r) {
      integers[r] += p.words * 4 * Quads;
    }
  }
  for (int r = 0; r < M; ++r) {
    for (int b = 0; b < B; ++b) {
      const int count = columns - b * kLanes < kLanes ? columns - b * kLanes : kLanes;
      store_partial(acc[r][b], y + r * ldy + b * kLanes, count);
    }
  }
}

template <int Bits>
void multiply_int8_of(
    const Int8Panels& panels, const Int8Rows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  const auto run = [&](auto blocks, int column) {
    for_row_tiles<kInt8TileRows>(m, [&](auto rows, int row) {
      int8_tile<Bits, decltype(rows)::value, decltype(blocks)::value>(
          panels, column / kLanes, x, row, y + row * ldy + column, ldy, last - column);
    });
  };
  int column = first;
  for (; last - column > kLanes; column += kInt8Blocks * kLanes) {
    run(Constant<kInt8Blocks>{}, column);
  }
  if (column < last) {
    run(Constant<1>{}, column);
  }
}

void multiply_int8(
    const Int8Panels& panels, const Int8Rows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  panels.bits == 4 ? multiply_int8_of<4>(panels, x, m, first, last, y, ldy)
                   : multiply_int8_of<8>(panels, x, m, first, last, y, ldy);
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
