// Products of rows of activations as integers with a quantized matrix, as integers.h defines them. Part of kernels.cpp.
//
// The matrix is packed in panels, see IntegerPanels in kernels.h. A tile of results multiplies one or more rows of x by
// one or two panels. It processes a panel in blocks of kLanes rows.
#pragma once

#include "integers.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kBlocksOfPanel = kIntegerPanelRows / kLanes;
constexpr int kPanelsForOneRow = 2; // in a tile with one row of x
constexpr int kPanelsForManyRows = kBlocksOfPanel == 1 ? 2 : 1; // otherwise the sums would not fit in the registers

// The number of rows of x in a tile, for weights of `bits` bits and integers of x of this many digits.
constexpr int integer_tile_rows([[maybe_unused]] int bits, int digits) {
#if defined(__AVX512F__)
  return digits == 1 ? 8 : 4;
#else
  // With 4 bits, a sum takes two registers: see Sums<4>.
  return digits == 1 ? (bits == 4 ? 3 : 4) : digits == 2 ? 2 : 1;
#endif
}

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

// The dot product of a group from those of the digits of x, the lowest digit first.
template <int Digits>
inline Floats dot_product(const Ints* dots) {
  if constexpr (Digits == 1) {
    return __builtin_convertvector(dots[0], Floats);
  }
  // The two lowest digits make an integer of less than 31 bits.
  const Floats lower = __builtin_convertvector((dots[1] << 8) + dots[0], Floats);
  if constexpr (Digits == 2) {
    return lower;
  }
  return fused_multiply_add(__builtin_convertvector(dots[2], Floats), broadcast(0x1p16f), lower);
}

// Computes the products of M rows of x, from `row` on, with the panels panel, ..., panel + (P - 1) * between. Writes up
// to `columns` columns, from the first one of `panel` on.
template <int Bits, int Digits, int M, int P>
void integer_tile(const IntegerPanels& panels, int panel, int between, const IntegerRows& x, int row, float* y,
    ptrdiff_t ldy, int columns) {
  constexpr int B = P * kBlocksOfPanel;
  constexpr int Quads = 8 / Bits; // vectors of integers in a vector of words
  constexpr int kBytesOfFour = 4 * Sums<Bits>::kBytes;
  constexpr int D = Digits;
  // A dot product is computed as several sums, because their instructions do not wait for each other.
  constexpr int Parts = M * D * B >= 4 ? 1 : 2;
  constexpr int Step = Sums<Bits>::kAdditions / Quads; // vectors of words before finish(); 0: all of a group
  const IntegerPanels p = panels;
  const ptrdiff_t scale_size = p.scale_type == FloatType::float32 ? 4 : 2;
  const int8_t* integers[M * D];
  const char* groups[P]; // the present group of each panel
  for (int r = 0; r < M * D; ++r) {
    integers[r] = x.integers + (row * D + r) * x.stride;
  }
  for (int i = 0; i < P; ++i) {
    groups[i] = p.data + (panel + static_cast<ptrdiff_t>(i) * between) * p.panel_bytes;
  }
  // At `begin`, a group has `size` bytes for each row of its panel. Returns the place of those for the first row of
  // block b.
  const auto place = [&](int b, ptrdiff_t begin, ptrdiff_t size) __attribute__((always_inline)) {
    return groups[b / kBlocksOfPanel] + begin + b % kBlocksOfPanel * kLanes * size;
  };
  Floats acc[M][B] = {};
  for (int g = 0; g < p.groups; ++g) {
    Sums<Bits> sums[B][Parts][M * D] = {};
    const int step = Step > 0 ? Step : p.words; // divides p.words, a multiple of 4
    for (int begin = 0; begin < p.words; begin += step) {
      for (int i = begin; i < begin + step; i += Parts) {
        repeat<Parts>([&](auto part) __attribute__((always_inline)) {
          Words words[B];
          repeat<B>([&](auto b) __attribute__((always_inline)) {
            const char* from = place(b.value, (i + part.value) * (kIntegerPanelRows * 4), 4);
            if (b.value % kBlocksOfPanel == 0) { // once for each cache line
              prefetch(from + kPrefetchDistance);
            }
            words[b.value] = load<Words>(from);
          });
          repeat<Quads>([&](auto quad) __attribute__((always_inline)) {
            repeat<M * D>([&](auto r) __attribute__((always_inline)) {
              const auto four =
                  Sums<Bits>::load(integers[r.value] + ((i + part.value) * Quads + quad.value) * kBytesOfFour);
              repeat<B>([&](auto b) __attribute__((always_inline)) {
                sums[b.value][part.value][r.value].add(integers_of<Bits, decltype(quad)::value>(words[b.value]), four);
              });
            });
          });
        });
      }
      repeat<B * Parts>([&](auto i) __attribute__((always_inline)) {
        for (auto& sum : sums[i.value / Parts][i.value % Parts]) {
          sum.finish();
        }
      });
    }
    repeat<B>([&](auto b) __attribute__((always_inline)) {
      const char* from = place(b.value, p.words * (kIntegerPanelRows * 4), scale_size);
      const Floats scale = load_scales(from, p.scale_type);
      const Floats bias = load_scales(from + kIntegerPanelRows * scale_size, p.scale_type);
      repeat<M>([&](auto r) __attribute__((always_inline)) {
        const ptrdiff_t index = (row + r.value) * static_cast<ptrdiff_t>(x.groups) + g;
        Ints dots[D];
        for (int d = 0; d < D; ++d) {
          dots[d] = sums[b.value][0][r.value * D + d].total;
          for (int part = 1; part < Parts; ++part) {
            dots[d] += sums[b.value][part][r.value * D + d].total;
          }
        }
        Floats& total = acc[r.value][b.value];
        const Floats factor = scale * broadcast(x.scales[index]);
        total = fused_multiply_add(factor, dot_product<D>(dots), total);
        total = fused_multiply_add(bias, broadcast(x.sums[index]), total);
      });
    });
    for (const char*& group : groups) {
      group += p.group_bytes;
    }
    for (int r = 0; r < M * D; ++r) {
      integers[r] += p.words * Quads * kBytesOfFour;
    }
  }
  for (int b = 0; b < B; ++b) {
    const int column = b / kBlocksOfPanel * between * kIntegerPanelRows + b % kBlocksOfPanel * kLanes;
    const int count = columns - column < kLanes ? columns - column : kLanes;
    for (int r = 0; count > 0 && r < M; ++r) {
      store_partial(acc[r][b], y + r * ldy + column, count);
    }
  }
}

// Multiplies m rows of x, up to `Rows` at a time, by panels that are read in `Bands` bands.
template <int Bits, int Digits, int Rows, int Bands>
void integer_bands(
    const IntegerPanels& panels, const IntegerRows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  const int end = (last + kIntegerPanelRows - 1) / kIntegerPanelRows;
  for_bands<Bands>(first / kIntegerPanelRows, end, [&](auto bands, int panel, int between) {
    const int column = panel * kIntegerPanelRows;
    for_row_tiles<Rows>(m, [&](auto rows, int row) {
      integer_tile<Bits, Digits, decltype(rows)::value, decltype(bands)::value>(
          panels, panel, between, x, row, y + row * ldy + column, ldy, last - column);
    });
  });
}

template <int Bits, int Digits>
void multiply_integers_of(
    const IntegerPanels& panels, const IntegerRows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  m == 1 ? integer_bands<Bits, Digits, 1, kPanelsForOneRow>(panels, x, m, first, last, y, ldy)
         : integer_bands<Bits, Digits, integer_tile_rows(Bits, Digits), kPanelsForManyRows>(
               panels, x, m, first, last, y, ldy);
}

void multiply_integers(
    const IntegerPanels& panels, const IntegerRows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  with_digits(x.digits, [&](auto digits) {
    constexpr int Digits = decltype(digits)::value;
    panels.bits == 4 ? multiply_integers_of<4, Digits>(panels, x, m, first, last, y, ldy)
                     : multiply_integers_of<8, Digits>(panels, x, m, first, last, y, ldy);
  });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
