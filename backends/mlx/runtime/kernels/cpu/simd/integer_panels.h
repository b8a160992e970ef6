// Products of rows of activations as integers with a quantized matrix, as integers.h defines them. Part of kernels.cpp.
//
// The matrix is packed in panels, see IntegerPanels in kernels.h. A tile of results multiplies one or more rows of x by
// one or two panels. It processes a panel in blocks of kLanes rows.
#pragma once

#include "integers.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kBlocksOfPanel = kIntegerPanelRows / kLanes;
constexpr int kPanelsForManyRows = kBlocksOfPanel == 1 ? 2 : 1; // otherwise the sums would not fit in the registers

// The number of panels in a tile with one row of x, whose integers have this many digits.
constexpr int panels_for_one_row(int digits) { return kBlocksOfPanel * digits < 8 ? 2 : 1; }

// The number of rows of x in a tile, for weights of `bits` bits and integers of x of this many digits.
constexpr int integer_tile_rows([[maybe_unused]] int bits, int digits) {
#if defined(__AVX512F__)
  return digits == 1 ? 8 : 4;
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return digits == 1 ? 4 : 2;
#elif defined(__aarch64__)
  return digits == 1 ? 4 : digits == 2 ? 2 : 1;
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
#if defined(__aarch64__)
  if constexpr (Bits == 4 && Quad == 1) {
    return (Words)vshrq_n_u8((uint8x16_t)words, 4);
  }
#endif
  return Bits == 8 ? words : words >> 4 * Quad & 0x0f0f0f0fu;
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// Products of a vector of rows of the matrix with two rows of x. An instruction multiplies eight bytes of two rows of
// each.
struct RowPairSums {
  int32x4_t low, high; // [2, 2]: two rows of the matrix, and two of x

  // `first` and `second` have four integers each of the rows of the matrix, x has eight each of its rows.
  void add(Words first, Words second, int8x16_t x) {
    low = vusmmlaq_s32(low, (uint8x16_t)vzip1q_u32((uint32x4_t)first, (uint32x4_t)second), x);
    high = vusmmlaq_s32(high, (uint8x16_t)vzip2q_u32((uint32x4_t)first, (uint32x4_t)second), x);
  }

  // The sums for one of the two rows of x.
  template <int Row>
  Ints total() const {
    return (Ints)(Row == 0 ? vuzp1q_s32(low, high) : vuzp2q_s32(low, high));
  }
};
constexpr bool kMultipliesRowPairs = true;

// Adds the products of a group of `words` words with pairs of rows of x, whose digits are at `integers`: the digits of
// a row have the distance `stride`, and so have the last digit of a row and the next row. place() is as in
// integer_tile().
template <int Bits, int Digits, int B, int Pairs, typename Place>
__attribute__((always_inline)) inline void add_row_pairs(
    int words, const int8_t* const* integers, ptrdiff_t stride, const Place& place, RowPairSums (&sums)[B][Pairs]) {
  constexpr int kRowBytes = kIntegerPanelRows * 4; // from a word of the rows of a panel to the next one
  constexpr int Step = Bits / 4; // words with eight integers
  for (int i = 0; i < words; i += Step) {
    int8x16_t x[Pairs];
    repeat<Pairs>([&](auto pair) __attribute__((always_inline)) {
      const int8_t* const first = integers[pair.value / Digits * 2 * Digits + pair.value % Digits] + i / Step * 8;
      x[pair.value] = vcombine_s8(vld1_s8(first), vld1_s8(first + Digits * stride));
    });
    repeat<B>([&](auto b) __attribute__((always_inline)) {
      const char* const from = place(b.value, i * kRowBytes, 4);
      for (int word = 0; b.value % kBlocksOfPanel == 0 && word < Step; ++word) {
        prefetch(from + word * kRowBytes + kPrefetchDistance);
      }
      const Words first = load<Words>(from);
      const Words second = Bits == 8 ? load<Words>(from + kRowBytes) : integers_of<4, 1>(first);
      repeat<Pairs>([&](auto pair) __attribute__((always_inline)) {
        sums[b.value][pair.value].add(integers_of<Bits, 0>(first), second, x[pair.value]);
      });
    });
  }
}
#else
struct RowPairSums {};
constexpr bool kMultipliesRowPairs = false;
#endif

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
  constexpr bool kPairs = kMultipliesRowPairs && M % 2 == 0;
  Floats acc[M][B] = {};
  for (int g = 0; g < p.groups; ++g) {
    Sums<Bits> sums[B][Parts][M * D] = {};
    RowPairSums pairs[B][(M + 1) / 2 * D] = {};
    if constexpr (kPairs) {
      add_row_pairs<Bits, D, B>(p.words, integers, x.stride, place, pairs);
    } else {
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
                  sums[b.value][part.value][r.value].add(
                      integers_of<Bits, decltype(quad)::value>(words[b.value]), four);
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
    }
    repeat<B>([&](auto b) __attribute__((always_inline)) {
      const char* from = place(b.value, p.words * (kIntegerPanelRows * 4), scale_size);
      const Floats scale = load_scales(from, p.scale_type);
      const Floats bias = load_scales(from + kIntegerPanelRows * scale_size, p.scale_type);
      repeat<M>([&](auto r) __attribute__((always_inline)) {
        const ptrdiff_t index = (row + r.value) * static_cast<ptrdiff_t>(x.groups) + g;
        Ints dots[D];
        for (int d = 0; d < D; ++d) {
          if constexpr (kPairs) {
            dots[d] = pairs[b.value][r.value / 2 * D + d].template total<r.value % 2>();
            continue;
          }
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
  m == 1 ? integer_bands<Bits, Digits, 1, panels_for_one_row(Digits)>(panels, x, m, first, last, y, ldy)
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
