// Products of x [m, k] with a row-major matrix [k, n]. Part of kernels.cpp.
//
// Each result adds the products in ascending order of k, each with a fused multiply-add if the instruction set has one,
// and then the addend. It therefore depends only on one row of x, one column of the matrix and one addend, and further
// products with zeros do not change it.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kColumnTileRows = kRegisters == 32 ? 6 : 4;
constexpr int kMaxColumnTileRows = kRegisters == 32 ? 8 : 4;
constexpr int column_vectors(int rows) {
  return rows <= 2 ? kRegisters / 2 / rows : kRegisters == 32 && rows <= 6 ? 4 : 3;
}

// The rows of a tile if x has m rows. Up to kMaxColumnTileRows rows make a single tile, which reads the matrix once.
constexpr int column_tile_rows(int m) { return m <= kMaxColumnTileRows ? m : kColumnTileRows; }

// From this number of row tiles on, the columns of the matrix that a tile reads are first copied to contiguous memory,
// as float32. The copy stays in the cache, and its rows do not compete for the same cache lines.
constexpr int kManyColumnTiles = 4;
constexpr int kMaxCopiedDepth = 256; // rows of the matrix that the copy has room for

// Computes M rows and V vectors of columns. If `columns` is less than kLanes, V is 1, and these columns are computed.
// `IsCached` says that the matrix is in the second-level cache already.
template <FloatType Type, int M, int V, bool IsCached>
void column_tile(const float* x, ptrdiff_t ldx, const typename Elements<Type>::Element* b, ptrdiff_t ldb, int columns,
    int k, bool accumulate, const float* addend, ptrdiff_t lda, float* y, ptrdiff_t ldy) {
  const auto load_vector = [&](const float* from) {
    return V > 1 || columns >= kLanes ? load<Floats>(from) : load_partial<Floats>(from, columns);
  };
  // Without repeat(), the compiler clears the array in memory, which takes as long as some rows of the matrix.
  Floats acc[M][V];
  repeat<M * V>([&](auto i) {
    constexpr int r = decltype(i)::value / V, v = decltype(i)::value % V;
    acc[r][v] = accumulate ? load_vector(y + r * ldy + v * kLanes) : Floats{};
  });
  for (int r = 0; addend != nullptr && r < M; ++r) {
    for (int v = 0; v < V; ++v) {
      __builtin_prefetch(addend + r * lda + v * kLanes);
    }
  }
  const ptrdiff_t rows_ahead = IsCached ? 0 : rows_to_prefetch(ldb * sizeof(*b));
  const ptrdiff_t prefetching_rows = rows_ahead == 0 ? 0 : k - rows_ahead;
  for (int i = 0; i < k; ++i) {
    Floats weights[V];
    for (int v = 0; v < V; ++v) {
      const auto* from = b + i * ldb + v * kLanes;
      constexpr int vectors_per_line = 64 / (kLanes * sizeof(*b));
      if (i < prefetching_rows && v % vectors_per_line == 0) {
        prefetch(from + rows_ahead * ldb);
      }
      weights[v] =
          V > 1 || columns >= kLanes ? Elements<Type>::load_all(from) : Elements<Type>::load_first(from, columns);
    }
    for (int r = 0; r < M; ++r) {
      const Floats element = broadcast(x[r * ldx + i]);
      for (int v = 0; v < V; ++v) {
        acc[r][v] = multiply_add<Type>(element, weights[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < M; ++r) {
    for (int v = 0; v < V; ++v) {
      if (addend != nullptr) {
        acc[r][v] += load_vector(addend + r * lda + v * kLanes);
      }
      float* to = y + r * ldy + v * kLanes;
      V > 1 || columns >= kLanes ? store(acc[r][v], to) : store_partial(acc[r][v], to, columns);
    }
  }
}

// Computes all columns of M rows, in tiles of V vectors and then in narrower ones.
template <FloatType Type, int M, int V = column_vectors(M), bool IsCached = false>
void column_tiles(const float* x, ptrdiff_t ldx, const typename Elements<Type>::Element* b, ptrdiff_t ldb, int n, int k,
    bool accumulate, const float* addend, ptrdiff_t lda, float* y, ptrdiff_t ldy) {
  const auto addend_at = [&](int j) { return addend == nullptr ? nullptr : addend + j; };
  constexpr int width = V * kLanes;
  int j = 0;
  for (; V == 1 ? j < n : j + width <= n; j += width) {
    const int columns = V == 1 ? n - j : width;
    column_tile<Type, M, V, IsCached>(x, ldx, b + j, ldb, columns, k, accumulate, addend_at(j), lda, y + j, ldy);
  }
  if constexpr (V > 1) {
    if (j < n) {
      column_tiles<Type, M, (V == 3 ? 2 : V / 2), IsCached>(
          x, ldx, b + j, ldb, n - j, k, accumulate, addend_at(j), lda, y + j, ldy);
    }
  }
}

template <FloatType Type, bool IsCached = false>
void column_tiles_of_rows(const float* x, ptrdiff_t ldx, int m, const typename Elements<Type>::Element* b,
    ptrdiff_t ldb, int n, int k, bool accumulate, const float* addend, ptrdiff_t lda, float* y, ptrdiff_t ldy) {
  const auto compute_tile = [&](auto rows, int first) {
    constexpr int m = decltype(rows)::value;
    column_tiles<Type, m, column_vectors(m), IsCached>(x + first * ldx, ldx, b, ldb, n, k, accumulate,
        addend == nullptr ? nullptr : addend + first * lda, lda, y + first * ldy, ldy);
  };
  if (m <= kMaxColumnTileRows) {
    return for_row_tiles<kMaxColumnTileRows>(m, compute_tile);
  }
  for_row_tiles<kColumnTileRows>(m, compute_tile);
}

template <FloatType Type>
void multiply_columns_of(const float* x, ptrdiff_t ldx, int m, const void* matrix, ptrdiff_t ldb, int n, int k,
    bool accumulate, const float* addend, ptrdiff_t lda, float* y, ptrdiff_t ldy) {
  const auto* b = static_cast<const typename Elements<Type>::Element*>(matrix);
  constexpr bool is_half = sizeof(*b) == 2;
  if (m < kManyColumnTiles * kColumnTileRows || k > kMaxCopiedDepth || (n == ldb && !is_half)) {
    return column_tiles_of_rows<Type>(x, ldx, m, b, ldb, n, k, accumulate, addend, lda, y, ldy);
  }
  constexpr int width = column_vectors(kColumnTileRows) * kLanes;
  alignas(64) float copy[kMaxCopiedDepth * width];
  for (int j = 0; j < n; j += width) {
    const int columns = n - j < width ? n - j : width;
    for (int i = 0; i < k; ++i) {
      const auto* from = b + i * ldb + j;
      int c = 0;
      for (; c + kLanes <= columns; c += kLanes) {
        store(Elements<Type>::load_all(from + c), copy + i * width + c);
      }
      if (c < columns) {
        store(Elements<Type>::load_first(from + c, columns - c), copy + i * width + c);
      }
    }
    column_tiles_of_rows<(is_half ? FloatType::float32 : Type), /*IsCached=*/true>(
        x, ldx, m, copy, width, columns, k, accumulate, addend == nullptr ? nullptr : addend + j, lda, y + j, ldy);
  }
}

int column_panel_width(int rows) { return column_vectors(column_tile_rows(rows)) * kLanes; }

// Computes three vectors of columns together, for any number of rows, because a panel is packed once for all of them.
// With a single row, the second-level cache is the limit, and eight rows fill the registers.
void multiply_recurrent_panel(const float* x, ptrdiff_t ldx, int m, const float* b, int n, int k, const float* addend,
    ptrdiff_t lda, float* y, ptrdiff_t ldy) {
  for_row_tiles<kMaxColumnTileRows>(m, [&](auto rows, int first) {
    column_tiles<FloatType::float32, decltype(rows)::value, 3, /*IsCached=*/true>(x + first * ldx, ldx, b, n, n, k,
        false, addend == nullptr ? nullptr : addend + first * lda, lda, y + first * ldy, ldy);
  });
}

void multiply_columns(const float* x, ptrdiff_t ldx, int m, const void* b, FloatType type, ptrdiff_t ldb, int n, int k,
    bool accumulate, const float* addend, ptrdiff_t lda, float* y, ptrdiff_t ldy) {
  with_type<FloatType::float16, FloatType::bfloat16, FloatType::bfloat16_pair, FloatType::float32>(
      type, [&](auto constant) {
        multiply_columns_of<decltype(constant)::value>(x, ldx, m, b, ldb, n, k, accumulate, addend, lda, y, ldy);
      });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
