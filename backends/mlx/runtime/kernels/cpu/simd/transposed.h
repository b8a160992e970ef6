// Products of x [m, k] with the rows of a matrix w [n, k], for attention: the rows are few and short, and change with
// every token, so that they cannot be packed once. Part of kernels.cpp.
//
// The rows are transposed, and the order of summation is that of columns.h: each result adds the products in ascending
// order of k. A lane holds the result of one row, so no sum over lanes is needed.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// Prefetches a part of later rows of x, with elements of `Size` bytes. A caller reads the next kLanes rows, from
// columns i ... i + kLanes - 1 on; when it has read all columns, as many later rows are prefetched. Rows without gaps
// are prefetched in the order in which they lie in memory. Attention to 2,048 keys then takes two thirds of the time,
// because memory is slower if kLanes places are read in turn.
template <ptrdiff_t Size>
__attribute__((always_inline)) inline void prefetch_later_rows(const char* x, ptrdiff_t ldx, int rows, int k, int i) {
  constexpr ptrdiff_t kDistance = 8 << 10; // bytes
  const ptrdiff_t row_bytes = ldx * Size;
  const ptrdiff_t rows_ahead = rows_to_prefetch(row_bytes, kDistance);
  if (rows_ahead >= rows) {
    return;
  }
  const char* later = x + rows_ahead * row_bytes;
  if (ldx == k) {
    for (ptrdiff_t byte = 0; byte < kLanes * kLanes * Size; byte += 64) {
      prefetch(later + i * kLanes * Size + byte);
    }
  } else {
    for (int r = 0; r < kLanes; ++r) {
      prefetch(later + r * row_bytes + i * Size);
    }
  }
}

// Writes the columns i ... i + kLanes - 1 of x [rows, k] to the vectors v: lane r has the element of row r, for r <
// kLanes. Lanes without a row, and vectors without a column, have any values. Always inlined: as a call, it takes twice
// as long.
template <FloatType Type>
__attribute__((always_inline)) inline void load_transposed(
    const typename Elements<Type>::Element* x, ptrdiff_t ldx, int rows, int k, int i, Floats* v) {
  prefetch_later_rows<sizeof(*x)>(reinterpret_cast<const char*>(x), ldx, rows, k, i);
  for (int r = 0; r < kLanes; ++r) {
    const auto* from = x + (r < rows ? r : 0) * ldx + i;
    v[r] = k - i >= kLanes ? Elements<Type>::load_all(from) : Elements<Type>::load_first(from, k - i);
  }
  transpose(v);
}

template <FloatType Type>
void transpose_rows_of(
    const typename Elements<Type>::Element* x, ptrdiff_t ldx, int n, int k, float* y, ptrdiff_t ldy) {
  for (int j = 0; j < n; j += kLanes) {
    for (int i = 0; i < k; i += kLanes) {
      Floats v[kLanes];
      load_transposed<Type>(x + j * ldx, ldx, n - j, k, i, v);
      for (int c = 0; c < kLanes && i + c < k; ++c) {
        store(v[c], y + (i + c) * ldy + j);
      }
    }
  }
}

void transpose_rows(const void* x, FloatType type, ptrdiff_t ldx, int n, int k, float* y, ptrdiff_t ldy) {
  const auto* halves = static_cast<const uint16_t*>(x);
  switch (type) {
    case FloatType::float16:
      return transpose_rows_of<FloatType::float16>(halves, ldx, n, k, y, ldy);
    case FloatType::bfloat16:
      return transpose_rows_of<FloatType::bfloat16>(halves, ldx, n, k, y, ldy);
    default:
      return transpose_rows_of<FloatType::float32>(static_cast<const float*>(x), ldx, n, k, y, ldy);
  }
}

// Computes M rows of the product of multiply_transposed. The transposed vectors stay in registers.
template <FloatType Type, int M>
void multiply_transposed_tile(const float* x, ptrdiff_t ldx, const typename Elements<Type>::Element* w, ptrdiff_t ldw,
    int n, int k, float* y, ptrdiff_t ldy) {
  for (int j = 0; j < n; j += kLanes) {
    Floats acc[M] = {};
    for (int i = 0; i < k; i += kLanes) {
      Floats v[kLanes];
      load_transposed<Type>(w + j * ldw, ldw, n - j, k, i, v);
      const auto add = [&](int c) __attribute__((always_inline)) {
        for (int r = 0; r < M; ++r) {
          acc[r] = multiply_add<Type>(broadcast(x[r * ldx + i + c]), v[c], acc[r]);
        }
      };
      if (k - i >= kLanes) {
        repeat<kLanes>([&](auto c) __attribute__((always_inline)) { add(c.value); });
      } else {
        for (int c = 0; c < k - i; ++c) {
          add(c);
        }
      }
    }
    for (int r = 0; r < M; ++r) {
      store_partial(acc[r], y + r * ldy + j, n - j < kLanes ? n - j : kLanes);
    }
  }
}

template <FloatType Type>
void multiply_transposed_of(
    const float* x, ptrdiff_t ldx, int m, const void* matrix, ptrdiff_t ldw, int n, int k, float* y, ptrdiff_t ldy) {
  const auto* w = static_cast<const typename Elements<Type>::Element*>(matrix);
  for_row_tiles<kMaxTransposedRows>(m, [&](auto rows, int first) {
    multiply_transposed_tile<Type, decltype(rows)::value>(x + first * ldx, ldx, w, ldw, n, k, y + first * ldy, ldy);
  });
}

void multiply_transposed(const float* x, ptrdiff_t ldx, int m, const void* w, FloatType type, ptrdiff_t ldw, int n,
    int k, float* y, ptrdiff_t ldy) {
  with_type<FloatType::float16, FloatType::bfloat16, FloatType::bfloat16_pair, FloatType::float32>(
      type, [&](auto constant) { multiply_transposed_of<decltype(constant)::value>(x, ldx, m, w, ldw, n, k, y, ldy); });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
