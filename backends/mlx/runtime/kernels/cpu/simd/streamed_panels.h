// Products of few rows of x with the panels of panels.h, which come from memory meanwhile. The results are those of
// dot.h, bit for bit. Several panels are read at the same time: one of each band, see for_bands(). Part of kernels.cpp.
#pragma once

#include "panels.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kSingleTileRows = 3; // of x, up to which one tile computes all rows
constexpr ptrdiff_t kPanelPrefetchDistance = 256; // floats

// Adds the vectors of `sums` in pairs, then these totals in pairs, and so on.
template <int Count>
inline Floats total_of(const Floats* sums) {
  if constexpr (Count == 1) {
    return sums[0];
  } else {
    return total_of<Count / 2>(sums) + total_of<Count / 2>(sums + Count / 2);
  }
}

// The panels at w, w + between, w + 2 * between, ...
struct PanelsOfBands {
  const float* w;
  ptrdiff_t between;
};

// Computes the sums of M rows of x, one of `Tiles` tiles, over a group of sections of P panels. `x` begins with the
// first element of the first section. Writes the sum of row r and panel p to sums[(r * P + p) * kSectionGroups].
// Prefetches a share of the weights that lie `ahead` floats further, so that the tiles together prefetch all of them.
template <int Tiles, int Tile, int M, int P>
inline void streamed_sections(
    const float* x, ptrdiff_t ldx, const PanelsOfBands& panels, int steps, ptrdiff_t ahead, Floats* sums) {
  constexpr int S = kSectionsTogether;
  Floats acc[S][M][P];
  // Without repeat(), the compiler keeps the array in memory.
  repeat<S * M * P>([&](auto i) {
    constexpr int v = decltype(i)::value;
    acc[v / (M * P)][v / P % M][v % P] = Floats{};
  });
  const float* w = panels.w;
  for (int step = 0; step < steps; ++step, w += kStepStride, x += kLanes) {
    repeat<S>([&](auto section) __attribute__((always_inline)) {
      constexpr int s = decltype(section)::value;
      Floats weights[P];
      repeat<P>([&](auto p) __attribute__((always_inline)) {
        const float* const from = w + p.value * panels.between + s * kLanes;
        if constexpr ((s * P + p.value) % Tiles == Tile) {
          prefetch(from + ahead);
        }
        weights[p.value] = load<Floats>(from);
      });
      repeat<M>([&](auto r) __attribute__((always_inline)) {
        Floats element = broadcast(x[r.value * ldx + s * kSectionGroups]);
        keep_in_register(element);
        repeat<P>([&](auto p) __attribute__((always_inline)) {
          acc[s][r.value][p.value] =
              multiply_add<FloatType::bfloat16_pair>(element, weights[p.value], acc[s][r.value][p.value]);
        });
      });
    });
  }
  repeat<M * P>([&](auto i) {
    constexpr int r = decltype(i)::value / P, p = decltype(i)::value % P;
    Floats total = acc[0][r][p];
    if constexpr (S == 2) {
      total += acc[1][r][p];
    }
    sums[(r * P + p) * kSectionGroups] = total;
  });
}

// Multiplies m rows of x by P panels. Writes `columns` columns for each panel, `y_between` columns apart. Two tiles of
// rows use a group of sections before the next group, which they prefetch meanwhile.
template <int P>
__attribute__((noinline)) void streamed_tile(const float* x, ptrdiff_t ldx, int m, PanelsOfBands panels, int k,
    int columns, const PanelResults& y, ptrdiff_t y_between) {
  const ptrdiff_t stride = section_group_stride(k);
  const int steps = steps_of(k);
  Floats sums[kMaxStreamedRows][P][kSectionGroups];
  for (int group = 0; group < kSectionGroups; ++group, panels.w += stride) {
    const float* const sections = x + reversed_bits(group * kSectionsTogether);
    const auto add_tile = [&](auto rows, auto tiles, auto tile, int first, ptrdiff_t ahead) {
      streamed_sections<decltype(tiles)::value, decltype(tile)::value, decltype(rows)::value, P>(
          sections + first * ldx, ldx, panels, steps, ahead, &sums[first][0][group]);
    };
    if (m <= kSingleTileRows) {
      call_with_constant<kSingleTileRows>(
          m, [&](auto rows) { add_tile(rows, Constant<1>{}, Constant<0>{}, 0, kPanelPrefetchDistance); });
    } else {
      constexpr int kMax = kMaxStreamedRows / 2;
      const int half = (m + 1) / 2;
      call_with_constant<kMax>(half, [&](auto rows) { add_tile(rows, Constant<2>{}, Constant<0>{}, 0, stride); });
      call_with_constant<kMax>(
          m - half, [&](auto rows) { add_tile(rows, Constant<2>{}, Constant<1>{}, half, stride); });
    }
  }
  for (int r = 0; r < m; ++r) {
    for (int p = 0; p < P; ++p) {
      const Floats total = total_of<kSectionGroups>(sums[r][p]);
      char* const to = y.at(r, p * y_between);
      with_result_type(y.type, [&](auto type) { write_results<decltype(type)::value>(total, to, columns); });
    }
  }
}

void multiply_streamed_panels(
    const float* x, ptrdiff_t ldx, int m, const float* w, int n, int k, void* to, FloatType y_type, ptrdiff_t ldy) {
  const PanelResults y = {static_cast<char*>(to), y_type, ldy};
  const ptrdiff_t size = static_cast<ptrdiff_t>(panel_size(k));
  const auto multiply_bands = [&](auto bands, int panel, int between) {
    streamed_tile<decltype(bands)::value>(x, ldx, m, {w + panel * size, between * size}, k, kLanes,
        y.from(0, ptrdiff_t{panel} * kLanes), ptrdiff_t{between} * kLanes);
  };
  // Where a single panel would be left, two times two bands: one band alone is slow.
  static_assert(kPanelsTogether == 3);
  const int panels = n / kLanes;
  const int rest = panels % 3 == 1 && panels > 1 ? 4 : panels % 3;
  for_bands<3>(0, panels - rest, multiply_bands);
  for_bands<2>(panels - rest, panels, multiply_bands);
  if (const int columns = n % kLanes; columns > 0) {
    streamed_tile<1>(x, ldx, m, {w + panels * size, 0}, k, columns, y.from(0, n - columns), 0);
  }
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
