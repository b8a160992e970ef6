// Matrix products with AMX, whose registers are tiles: 16 rows of 64 bytes. Compiled once, for AMX. This file must not
// include headers that define inline functions outside its namespace, see kernels.cpp.
#include "kernels.h"

#include "integer_panels.h"
#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr ptrdiff_t kRowBytes = 64; // of a tile
constexpr ptrdiff_t kFloats = kTileRows * kTileRows; // in a tile

// Makes the compiler write this memory now: it does not know that the instructions that load tiles read memory.
inline void write_now(const void* memory) { asm volatile("" : : "r"(memory) : "memory"); }

// What the instruction for the configuration reads: the sizes of the tiles.
struct Configuration {
  uint8_t palette = 1;
  uint8_t start = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};

  void load() const {
    write_now(this);
    _tile_loadconfig(this);
  }
};

// -- bfloat16 -------------------------------------------------------------------------------------
//
// An instruction multiplies a tile of w, 16 rows of 32 elements, by a tile of x, 16 pairs of elements of 16 rows. The
// products of the pairs are added in ascending order, those of their first elements in one sum and those of their
// second elements in another. The total of both sums is then added to the result. Subnormal numbers count as zeros. A
// result depends on its rows of x and w alone, not on their places in the tiles.

constexpr int kElements = 2 * kTileRows; // of a row in a tile of w
constexpr int kBlockRows = 2 * kTileRows; // of w, and at most of x, in a block of results

// A tile in memory, with the number of bytes between its rows.
struct Tile {
  const void* data;
  ptrdiff_t stride;
};

// A matrix w [n, k], as tiles. Beyond its last row and column there are zeros.
struct Matrix {
  const uint16_t* w;
  ptrdiff_t ldw;
  int n;
  int k;

  // The tile from this row and column on: in its place, or copied to `copy` if it reaches beyond the matrix.
  Tile tile(int row, int column, uint16_t* copy) const {
    const uint16_t* from = w + row * ldw + column;
    if (row + kTileRows <= n && column + kElements <= k) [[likely]] {
      return {from, ldw * 2};
    }
    for (int r = 0; r < kTileRows; ++r) {
      for (int i = 0; i < kElements; ++i) {
        copy[r * kElements + i] = row + r < n && column + i < k ? from[r * ldw + i] : 0;
      }
    }
    write_now(copy);
    return {copy, kRowBytes};
  }
};

// Memory that is prefetched in equal parts.
struct Ahead {
  const char* next;
  ptrdiff_t part;

  void prefetch_part() {
    for (const char* end = next + part; next < end; next += 64) {
      prefetch(next);
    }
  }
};

// Computes the products of the rows row ... row + kBlockRows - 1 of w with X tiles of x, which lie x_tile floats apart.
// y is [kBlockRows, X * kTileRows]. The tiles 0 to 3 have the results, 4 and 5 rows of w, and 6 and 7 rows of x.
template <int X>
void multiply_block(const Matrix& w, int row, const float* x, ptrdiff_t x_tile, Ahead& ahead, float* y) {
  constexpr ptrdiff_t kStride = X * kRowBytes;
  alignas(64) uint16_t copy[kTileRows * kElements];
  float* const second = y + X * kFloats;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int column = 0; column < w.k; column += kElements, x += kFloats) {
    ahead.prefetch_part();
    const Tile w0 = w.tile(row, column, copy);
    _tile_loadd(4, w0.data, w0.stride);
    _tile_loadd(6, x, kRowBytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (X == 2) {
      _tile_loadd(7, x + x_tile, kRowBytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    const Tile w1 = w.tile(row + kTileRows, column, copy);
    _tile_loadd(5, w1.data, w1.stride);
    _tile_dpbf16ps(2, 5, 6);
    if constexpr (X == 2) {
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, y, kStride);
  _tile_stored(2, second, kStride);
  if constexpr (X == 2) {
    _tile_stored(1, y + kTileRows, kStride);
    _tile_stored(3, second + kTileRows, kStride);
  }
}

// Writes up to kTileRows rows and columns of y. `results` [kTileRows, ld] has the columns in its rows.
void store_transposed(const float* results, ptrdiff_t ld, int rows, int columns, float* y, ptrdiff_t ldy) {
  Floats v[kTileRows];
  for (int c = 0; c < kTileRows; ++c) {
    v[c] = load<Floats>(results + c * ld);
  }
  transpose(v);
  for (int r = 0; r < rows && r < kTileRows; ++r) {
    store_lanes(v[r], y + r * ldy, columns < kTileRows ? columns : kTileRows);
  }
}

} // namespace

void multiply_tiles(
    const float* x, int m, const uint16_t* matrix, ptrdiff_t ldw, int n, int k, float* y, ptrdiff_t ldy) {
  Configuration().load();
  const Matrix w{matrix, ldw, n, k};
  const ptrdiff_t steps = (k + kElements - 1) / kElements;
  const ptrdiff_t all_steps = steps * ((m + kBlockRows - 1) / kBlockRows); // for some rows of w
  const ptrdiff_t x_tile = steps * kFloats;
  alignas(64) float results[kBlockRows * kBlockRows];
  for (int column = 0; column < n; column += kBlockRows) {
    // The next rows of w come from memory while these ones are multiplied.
    const bool has_next = column + kBlockRows < n && all_steps > 0;
    Ahead ahead{reinterpret_cast<const char*>(matrix + (column + kBlockRows) * ldw),
        has_next ? (kBlockRows * ldw * 2 + all_steps - 1) / all_steps : 0};
    for (int row = 0; row < m; row += kBlockRows) {
      const float* rows = x + row / kTileRows * x_tile;
      const bool is_single = m - row <= kTileRows;
      is_single ? multiply_block<1>(w, column, rows, x_tile, ahead, results)
                : multiply_block<2>(w, column, rows, x_tile, ahead, results);
      const int width = is_single ? kTileRows : kBlockRows;
      for (int c = 0; c < kBlockRows && column + c < n; c += kTileRows) {
        for (int r = 0; r < width; r += kTileRows) {
          store_transposed(
              results + c * width + r, width, m - row - r, n - column - c, y + (row + r) * ldy + column + c, ldy);
        }
      }
    }
  }
  _tile_release();
}

// -- attention ------------------------------------------------------------------------------------
//
// The weights of the values are float32. Each one is rounded to the sum of two bfloat16 numbers, with an error of at
// most 2^-17. For 32 values at a time, the products with the first numbers are added to the result, as above, and then
// those with the second numbers.

namespace {

constexpr int kMaxSteps = kMaxTileValues / kElements;
constexpr int kParts = 2; // of a weight

// The weights of kElements values in kTileRows rows.
struct WeightTiles {
  alignas(64) uint16_t parts[kParts][kTileRows][kElements];
};

// Writes weights [m, k] as [tiles of rows, steps]. The weights from k on are zeros, and those of rows from m on any
// numbers.
void split_weights(const float* weights, ptrdiff_t ldw, int m, int k, int steps, WeightTiles* tiles) {
  for (int row = 0; row < m; ++row, weights += ldw) {
    WeightTiles* const of_row = tiles + row / kTileRows * steps;
    for (int i = 0; i < steps * kElements; i += kLanes) {
      WeightTiles& tile = of_row[i / kElements];
      const int left = k <= i ? 0 : (k - i < kLanes ? k - i : kLanes);
      Floats x = load_lanes(weights + i, left);
      for (auto& part : tile.parts) {
        const auto rounded = (Halves)_mm512_cvtneps_pbh((__m512)x);
        __builtin_memcpy(part[row % kTileRows] + i % kElements, &rounded, sizeof(rounded));
        x -= to_float<FloatType::bfloat16>(rounded);
      }
    }
  }
  write_now(tiles);
}

// Writes kTileRows columns of `values` [k, n] as `steps` tiles of pairs, with zeros from k on.
void pack_values(const uint16_t* values, ptrdiff_t ldv, int k, int steps, Words* tiles) {
  for (int pair = 0; pair < steps * kTileRows; ++pair) {
    const int i = 2 * pair;
    const Halves first = i < k ? load<Halves>(values + i * ldv) : Halves{};
    const Halves second = i + 1 < k ? load<Halves>(values + (i + 1) * ldv) : Halves{};
    tiles[pair] = to_words(first) | to_words(second) << 16;
  }
  write_now(tiles);
}

// Adds the products of R tiles of rows with C tiles of columns to y. The tiles 0 to 3 have the results, 4 and 5
// weights, and 6 and 7 values.
template <int R, int C>
void add_values(const WeightTiles* weights, const Words (*values)[kMaxSteps * kTileRows], int steps, bool accumulate,
    float* y, ptrdiff_t ldy) {
  float* const second = y + kTileRows * ldy;
  const ptrdiff_t stride = ldy * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (accumulate) {
    _tile_loadd(0, y, stride);
    if constexpr (C == 2) {
      _tile_loadd(1, y + kTileRows, stride);
    }
    if constexpr (R == 2) {
      _tile_loadd(2, second, stride);
    }
    if constexpr (R == 2 && C == 2) {
      _tile_loadd(3, second + kTileRows, stride);
    }
  }
  for (int step = 0; step < steps; ++step, ++weights) {
    _tile_loadd(6, values[0] + step * kTileRows, kRowBytes);
    if constexpr (C == 2) {
      _tile_loadd(7, values[1] + step * kTileRows, kRowBytes);
    }
    for (int part = 0; part < kParts; ++part) {
      _tile_loadd(4, weights->parts[part], kRowBytes);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (C == 2) {
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (R == 2) {
        _tile_loadd(5, weights[steps].parts[part], kRowBytes);
        _tile_dpbf16ps(2, 5, 6);
      }
      if constexpr (R == 2 && C == 2) {
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, y, stride);
  if constexpr (C == 2) {
    _tile_stored(1, y + kTileRows, stride);
  }
  if constexpr (R == 2) {
    _tile_stored(2, second, stride);
  }
  if constexpr (R == 2 && C == 2) {
    _tile_stored(3, second + kTileRows, stride);
  }
}

} // namespace

void multiply_value_tiles(const float* weights, ptrdiff_t ldw, int m, const uint16_t* values, ptrdiff_t ldv, int n,
    int k, bool accumulate, float* y, ptrdiff_t ldy) {
  Configuration configuration;
  if (m < kTileRows) { // fewer rows take less time
    configuration.rows[0] = configuration.rows[1] = configuration.rows[4] = static_cast<uint8_t>(m);
  }
  configuration.load();
  const int steps = (k + kElements - 1) / kElements;
  WeightTiles packed_weights[kMaxTileValueRows / kTileRows * kMaxSteps];
  alignas(64) Words packed_values[2][kMaxSteps * kTileRows];
  split_weights(weights, ldw, m, k, steps, packed_weights);
  for (int column = 0; column < n; column += kBlockRows) {
    const bool is_single = n - column == kTileRows;
    for (int i = 0; i < (is_single ? 1 : 2); ++i) {
      pack_values(values + column + i * kTileRows, ldv, k, steps, packed_values[i]);
    }
    for (int row = 0; row < m; row += kBlockRows) {
      const auto add = m - row <= kTileRows ? (is_single ? add_values<1, 1> : add_values<1, 2>)
                                            : (is_single ? add_values<2, 1> : add_values<2, 2>);
      add(packed_weights + row / kTileRows * steps, packed_values, steps, accumulate, y + row * ldy + column, ldy);
    }
  }
  _tile_release();
}

// -- integers -------------------------------------------------------------------------------------
//
// An instruction multiplies a tile of x, 16 rows of up to 64 integers, by a tile of the matrix: up to 16 times four
// integers of each of the 16 rows of a panel. The results are those of integer_panels.h, bit for bit, because the dot
// products are exact.

namespace {

constexpr int kMaxDepth = 64; // integers of a row in a tile
constexpr int kMaxStepsOfGroup = 2; // tiles of a group, which has at most 128 integers
constexpr int kRowBlock = 128; // rows of x whose sums stay in the first-level cache

int integers_of_group(const IntegerPanels& p) { return p.words * 32 / p.bits; }

// The integers of a group that a row of a tile has.
int depth_of(const IntegerPanels& p) { return integers_of_group(p) < kMaxDepth ? integers_of_group(p) : kMaxDepth; }

// Writes a group of a panel of 4 bits as tiles, with one integer in each byte.
void unpack_group(const char* words, int count, uint8_t* to) {
  for (int i = 0; i < count; ++i, words += kRowBytes, to += 2 * kRowBytes) {
    const Words packed = load<Words>(words);
    const Words low = integers_of<4, 0>(packed), high = integers_of<4, 1>(packed);
    __builtin_memcpy(to, &low, sizeof(low));
    __builtin_memcpy(to + kRowBytes, &high, sizeof(high));
  }
  write_now(to);
}

// Computes the dot products of a group for 16 rows of x, which begin at x: dots[digit] has [rows, rows of the panel].
// The group is in the tiles 6 and, if it has a second step, 7.
template <int Digits>
void dot_products(const int8_t* x, ptrdiff_t stride, bool has_second_step, Ints (*dots)[kTileRows]) {
  const ptrdiff_t row = Digits * stride;
  _tile_zero(0);
  _tile_loadd(3, x, row);
  _tile_dpbsud(0, 3, 6);
  if constexpr (Digits > 1) {
    _tile_zero(1);
    _tile_loadd(4, x + stride, row);
    _tile_dpbsud(1, 4, 6);
  }
  if constexpr (Digits > 2) {
    _tile_zero(2);
    _tile_loadd(5, x + 2 * stride, row);
    _tile_dpbsud(2, 5, 6);
  }
  if (has_second_step) {
    _tile_loadd(3, x + kMaxDepth, row);
    _tile_dpbsud(0, 3, 7);
    if constexpr (Digits > 1) {
      _tile_loadd(4, x + stride + kMaxDepth, row);
      _tile_dpbsud(1, 4, 7);
    }
    if constexpr (Digits > 2) {
      _tile_loadd(5, x + 2 * stride + kMaxDepth, row);
      _tile_dpbsud(2, 5, 7);
    }
  }
  _tile_stored(0, dots[0], kRowBytes);
  if constexpr (Digits > 1) {
    _tile_stored(1, dots[1], kRowBytes);
  }
  if constexpr (Digits > 2) {
    _tile_stored(2, dots[2], kRowBytes);
  }
}

// Multiplies rows row ... row + m - 1 of x, of which there are at least kTileRows, by a panel. `sums` [m] has a vector
// for each row.
template <int Digits>
void multiply_panel(const IntegerPanels& p, const char* panel, const IntegerRows& x, int row, int m, Floats* sums) {
  const int size = integers_of_group(p);
  const int depth = depth_of(p);
  const bool has_second_step = size > kMaxDepth;
  const ptrdiff_t scale_bytes = kIntegerPanelRows * (p.scale_type == FloatType::float32 ? 4 : 2);
  alignas(64) uint8_t unpacked[kMaxStepsOfGroup * kMaxDepth * kIntegerPanelRows];
  alignas(64) Ints dots[2][Digits][kTileRows];
  for (int i = 0; i < m; ++i) {
    sums[i] = Floats{};
  }
  const int tiles = (m + kTileRows - 1) / kTileRows;
  // There are no rows beyond the last one, so the last two tiles may have rows in common.
  const auto first_row = [m](int tile) { return tile * kTileRows <= m - kTileRows ? tile * kTileRows : m - kTileRows; };
  for (int g = 0; g < p.groups; ++g, panel += p.group_bytes) {
    const char* tile = panel;
    if (p.bits == 4) {
      unpack_group(panel, p.words, unpacked);
      tile = reinterpret_cast<const char*>(unpacked);
    }
    _tile_loadd(6, tile, kRowBytes);
    if (has_second_step) {
      _tile_loadd(7, tile + depth * kIntegerPanelRows, kRowBytes);
    }
    const char* scales = panel + p.words * kRowBytes;
    prefetch(scales + kPrefetchDistance);
    const Floats scale = load_scales(scales, p.scale_type);
    const Floats bias = load_scales(scales + scale_bytes, p.scale_type);
    const int8_t* const integers = x.integers + ptrdiff_t{row} * Digits * x.stride + ptrdiff_t{g} * size;
    const auto multiply = [&](int tile) {
      dot_products<Digits>(
          integers + ptrdiff_t{first_row(tile)} * Digits * x.stride, x.stride, has_second_step, dots[tile % 2]);
    };
    multiply(0);
    for (int tile = 0; tile < tiles; ++tile) {
      if (tile + 1 < tiles) {
        multiply(tile + 1); // long before its results are read
      }
      const int first = first_row(tile);
      for (int r = tile * kTileRows - first; r < kTileRows; ++r) {
        const ptrdiff_t index = ptrdiff_t{row + first + r} * x.groups + g;
        Ints digits[Digits];
        for (int d = 0; d < Digits; ++d) {
          digits[d] = dots[tile % 2][d][r];
        }
        const Floats factor = scale * broadcast(x.scales[index]);
        Floats& sum = sums[first + r];
        sum = fused_multiply_add(factor, dot_product<Digits>(digits), sum);
        sum = fused_multiply_add(bias, broadcast(x.sums[index]), sum);
      }
    }
  }
}

} // namespace

void multiply_integer_tiles(
    const IntegerPanels& panels, const IntegerRows& x, int m, int first, int last, float* y, ptrdiff_t ldy) {
  const int depth = depth_of(panels);
  Configuration configuration;
  for (int i = 3; i < 6; ++i) {
    configuration.row_bytes[i] = static_cast<uint16_t>(depth);
  }
  for (int i = 6; i < 8; ++i) {
    configuration.rows[i] = static_cast<uint8_t>(depth / 4);
  }
  configuration.load();
  alignas(64) Floats sums[kRowBlock + kTileRows];
  for (int column = first; column < last; column += kIntegerPanelRows) {
    const char* panel = panels.data + ptrdiff_t{column / kIntegerPanelRows} * panels.panel_bytes;
    const int columns = last - column < kIntegerPanelRows ? last - column : kIntegerPanelRows;
    for (int row = 0; row < m;) {
      // No block has fewer rows than a tile.
      const int left = m - row;
      const int rows = left < kRowBlock + kTileRows ? left : kRowBlock;
      with_digits(
          x.digits, [&](auto digits) { multiply_panel<decltype(digits)::value>(panels, panel, x, row, rows, sums); });
      for (int r = 0; r < rows; ++r) {
        store_lanes(sums[r], y + (row + r) * ldy + column, columns);
      }
      row += rows;
    }
  }
  _tile_release();
}

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
