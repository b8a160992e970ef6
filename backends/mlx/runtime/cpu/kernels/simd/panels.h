// Products of many rows of x with many rows of a matrix. The results are those of dot.h, bit for bit. Part of
// kernels.cpp.
//
// dot.h computes a result as kLanes partial sums. Partial sum i adds the products of the elements i, kLanes + i,
// 2 * kLanes + i, ... of the two rows. A panel holds kLanes rows in kLanes sections. Section i has the elements for
// partial sum i: element i of all rows, then element kLanes + i of all rows, and so on. A vector of a section therefore
// has the same element of kLanes rows, and a vector of accumulators has partial sum i of kLanes results.
//
// The partial sums are added in pairs, in the order of sums() in vector.h. As soon as both sums of a pair are complete,
// they are added, so that only a few of them are held at a time.
#pragma once

#include "dot.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kPanelTileRows = kLanes / 2;
constexpr int kPanelTilePanels = 3;
constexpr ptrdiff_t kCacheLine = 64;

inline int steps_of(int k) {
  return (k + kLanes - 1) / kLanes;
}

// The number of floats from one section to the next. It is an odd number of vectors, so that the sections do not
// compete for the same cache lines.
inline ptrdiff_t section_stride(int k) {
  return ptrdiff_t{steps_of(k) | 1} * kLanes;
}

size_t panel_size(int k) {
  return static_cast<size_t>(section_stride(k)) * kLanes;
}

void pack_panel(const float* x, ptrdiff_t ldx, int rows, int k, float* panel) {
  const ptrdiff_t stride = section_stride(k);
  for (int i = 0; i < k; i += kLanes, panel += kLanes) {
    const int count = k - i < kLanes ? k - i : kLanes;
    Floats v[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      v[r] = r >= rows ? Floats{} : count == kLanes ? load<Floats>(x + r * ldx + i)
                                                    : load_partial<Floats>(x + r * ldx + i, count);
    }
    transpose(v);
    for (int section = 0; section < kLanes; ++section) {
      store(v[section], panel + section * stride);
    }
  }
}

inline int reversed_bits(int i) {
  int result = 0;
  for (int bit = 1; bit < kLanes; bit *= 2) {
    result = result * 2 + (i & bit ? 1 : 0);
  }
  return result;
}

// Computes a tile of kPanelTileRows rows and P * kLanes columns of results, one column for each row of P panels of w.
// Writes the first `rows` rows and `columns` columns of the tile to y: less than the full tile at the edges of y. Prefetches
// `lines` cache lines from `ahead` on for each section.
template <FloatType Type, int P>
void panel_tile(
    const float* x, const float* w, int k, int rows, int columns, float alpha, float beta, float* y, ptrdiff_t ldy,
    const char* ahead, ptrdiff_t lines) {
  constexpr int M = kPanelTileRows;
  const ptrdiff_t stride = section_stride(k);
  const ptrdiff_t size = static_cast<ptrdiff_t>(panel_size(k));
  const int steps = steps_of(k);
  Floats pending[5][M][P];  // [i] has a sum of 2^i partial sums, which waits for the other sum of its pair
  int level = 0;
  for (int i = 0; i < kLanes; ++i) {
    const ptrdiff_t section = reversed_bits(i) * stride;
    const float* xs = x + section;
    const float* ws = w + section;
    for (ptrdiff_t line = 0; line < lines; ++line, ahead += kCacheLine) {
      prefetch(ahead);
    }
    Floats acc[M][P] = {};
    // Without this, the loop is so short that its end, which the processor predicts wrongly, takes 3 % of the time.
#pragma GCC unroll 4
    for (int step = 0; step < steps; ++step, xs += kLanes, ws += kLanes) {
      Floats weights[P];
      for (int p = 0; p < P; ++p) {
        weights[p] = load<Floats>(ws + p * size);
      }
      for (int r = 0; r < M; ++r) {
        const Floats element = broadcast(xs[r]);
        for (int p = 0; p < P; ++p) {
          acc[r][p] = multiply_add<Type>(element, weights[p], acc[r][p]);
        }
      }
    }
    level = 0;
    for (; i >> level & 1; ++level) {
      for (int r = 0; r < M; ++r) {
        for (int p = 0; p < P; ++p) {
          acc[r][p] += pending[level][r][p];
        }
      }
    }
    __builtin_memcpy(pending[level], acc, sizeof(acc));
  }
  for (int r = 0; r < rows; ++r) {
    for (int p = 0; p < P; ++p) {
      float* to = y + r * ldy + p * kLanes;
      const int count = columns - p * kLanes < kLanes ? columns - p * kLanes : kLanes;
      const Floats old = beta == 0 ? Floats{} : load_partial<Floats>(to, count);
      store_partial(scaled(pending[level][r][p], alpha, beta, old), to, count);
    }
  }
}

template <FloatType Type>
void multiply_panels_of(
    const float* x, int m, const float* w, int n, int k, float alpha, float beta, float* y, ptrdiff_t ldy,
    const char* ahead, ptrdiff_t ahead_bytes) {
  const ptrdiff_t size = static_cast<ptrdiff_t>(panel_size(k));
  constexpr int block = kPanelTilePanels * kLanes;
  const ptrdiff_t tiles = ptrdiff_t{(n + block - 1) / block} * ((m + kPanelTileRows - 1) / kPanelTileRows);
  const ptrdiff_t lines = (ahead_bytes + tiles * kLanes * kCacheLine - 1) / (tiles * kLanes * kCacheLine);
  for (int column = 0; column < n; column += block) {
    const int columns = n - column < block ? n - column : block;
    call_with_constant<kPanelTilePanels>((columns + kLanes - 1) / kLanes, [&](auto panels) {
      for (int row = 0; row < m; row += kPanelTileRows) {
        const int rows = m - row < kPanelTileRows ? m - row : kPanelTileRows;
        panel_tile<Type, decltype(panels)::value>(
            x + row / kLanes * size + row % kLanes, w + column / kLanes * size, k, rows, columns, alpha, beta,
            y + row * ldy + column, ldy, ahead, lines);
        ahead += lines * kLanes * kCacheLine;
      }
    });
  }
}

void multiply_panels(
    FloatType type, const float* x, int m, const float* w, int n, int k, float alpha, float beta, float* y,
    ptrdiff_t ldy, const char* ahead, ptrdiff_t ahead_bytes) {
#if defined(__AVX512BF16__)
  if (type == FloatType::bfloat16_pair) {
    return multiply_panels_of<FloatType::bfloat16_pair>(x, m, w, n, k, alpha, beta, y, ldy, ahead, ahead_bytes);
  }
#else
  (void)type;  // always float32, because multiplies_bfloat16_pairs is false
#endif
  multiply_panels_of<FloatType::float32>(x, m, w, n, k, alpha, beta, y, ldy, ahead, ahead_bytes);
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
