// Products of x with the rows of a matrix: each result is a dot product of a row of x and a row of the matrix. Part of
// kernels.cpp.
//
// The order of summation is the same in all kernels for such products, also in quantized.h and panels.h. Lane i of a
// vector adds the products of the elements i, i + kLanes, i + 2 * kLanes, ... in this order, each with a fused
// multiply-add if the instruction set has one. Elements beyond the end count as zeros. sums() then adds the lanes. A
// result therefore depends only on the two rows, and not on the number of rows in a call or on their positions.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// Writes the sums of M * R accumulators: y[r * ldy + j * between] = sum(acc[r * R + j]).
template <int M, int R>
inline void write_sums(const Floats* acc, float* y, ptrdiff_t ldy, ptrdiff_t between) {
  constexpr int Total = M * R;
  constexpr int Vectors = (Total + kLanes - 1) / kLanes;
  Floats results[Vectors];
  constexpr int Whole = Total / kLanes;
  for (int i = 0; i < Whole; ++i) {
    results[i] = sums<kLanes>(acc + i * kLanes);
  }
  if constexpr (constexpr int left = Total % kLanes; left > 0) {
    constexpr int Count = left > 8 ? 16 : left > 4 ? 8 : left > 2 ? 4 : left;
    Floats padded[Count] = {};
    for (int i = 0; i < left; ++i) {
      padded[i] = acc[Whole * kLanes + i];
    }
    results[Whole] = sums<Count>(padded);
  }
  float totals[Vectors * kLanes];
  for (int i = 0; i < Vectors; ++i) {
    store(results[i], totals + i * kLanes);
  }
  for (int i = 0; i < Total; ++i) {
    y[i / R * ldy + i % R * between] = totals[i];
  }
}

// Multiplies M rows of x by R rows of the matrix: the row at w, and those `between`, 2 * between, ... rows after it.
// Writes to columns of y with the same distance. x has float32 elements, or pairs if w has. Not inlined, because GCC
// would then keep sums in memory.
template <FloatType Type, int M, int R>
__attribute__((noinline)) void dot_tile(const float* x, ptrdiff_t ldx, const typename Elements<Type>::Element* w,
    ptrdiff_t ldw, ptrdiff_t between, int k, float* y, ptrdiff_t ldy) {
  constexpr ptrdiff_t ahead = kBandPrefetchDistance<R> / ptrdiff_t{sizeof(*w)};
  const ptrdiff_t row_distance = between * ldw; // in elements
  Floats acc[M * R] = {};
  const auto add_step = [&](auto&& load_x, auto&& load_w) {
    Floats weights[R];
    for (int j = 0; j < R; ++j) {
      weights[j] = load_w(w + j * row_distance);
    }
    for (int r = 0; r < M; ++r) {
      Floats elements = load_x(x + r * ldx);
      keep_in_register(elements);
      for (int j = 0; j < R; ++j) {
        acc[r * R + j] = multiply_add<Type>(elements, weights[j], acc[r * R + j]);
      }
    }
  };
  int i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    for (int j = 0; j < R; ++j) {
      prefetch(w + j * row_distance + i + ahead);
    }
    add_step([&](const float* row) { return load<Floats>(row + i); },
        [&](const auto* row) { return Elements<Type>::load_all(row + i); });
  }
  if (i < k) {
    add_step([&](const float* row) { return load_partial<Floats>(row + i, k - i); },
        [&](const auto* row) { return Elements<Type>::load_first(row + i, k - i); });
  }
  write_sums<M, R>(acc, y, ldy, between);
}

// Multiplies m rows of x, up to `Rows` at a time, by n rows of w, which are read in `Bands` bands.
template <FloatType Type, int Rows, int Bands>
void dot_bands(const float* x, ptrdiff_t ldx, int m, const typename Elements<Type>::Element* w, ptrdiff_t ldw, int n,
    int k, float* y, ptrdiff_t ldy) {
  for_bands<Bands>(0, n, [&](auto bands, int j, int between) {
    for_row_tiles<Rows>(m, [&](auto rows, int first) {
      dot_tile<Type, decltype(rows)::value, decltype(bands)::value>(
          x + first * ldx, ldx, w + j * ldw, ldw, between, k, y + first * ldy + j, ldy);
    });
  });
}

template <FloatType Type>
void dot_rows_for_type(
    const float* x, ptrdiff_t ldx, int m, const void* w, ptrdiff_t ldw, int n, int k, float* y, ptrdiff_t ldy) {
  constexpr int kBandsForOneRow = 4; // more of them are not faster
  const auto* elements = static_cast<const typename Elements<Type>::Element*>(w);
  if (m == 1) {
    return dot_bands<Type, 1, kBandsForOneRow>(x, ldx, m, elements, ldw, n, k, y, ldy);
  }
  if constexpr (kRegisters == 32) {
    if (m == 7 || m == 8) { // one tile, which reads the matrix once
      return dot_bands<Type, 8, 3>(x, ldx, m, elements, ldw, n, k, y, ldy);
    }
  }
  dot_bands<Type, kDotTileRows, kDotTileColumns>(x, ldx, m, elements, ldw, n, k, y, ldy);
}

void dot_rows(const float* x, ptrdiff_t ldx, int m, const void* w, FloatType type, ptrdiff_t ldw, int n, int k,
    float* y, ptrdiff_t ldy) {
  with_type<FloatType::float16, FloatType::bfloat16, FloatType::bfloat16_pair>(
      type, [&](auto constant) { dot_rows_for_type<decltype(constant)::value>(x, ldx, m, w, ldw, n, k, y, ldy); });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
