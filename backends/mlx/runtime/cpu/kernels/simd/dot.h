// Products of a few rows of x with the rows of a matrix. Part of kernels.cpp.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// Multiplies M rows of x by one row w [k] of the matrix: y[r * ldy] = alpha * sum(x[r] * w) + beta * y[r * ldy]. One
// row of the matrix at a time is read in the order of memory. Several rows at a time would be read from several pages
// in turn, which reaches only two thirds of the memory bandwidth.
template <FloatType Type, int M>
void dot_row(
    const float* x, ptrdiff_t ldx, const typename Elements<Type>::Element* w, int k, float alpha, float beta, float* y,
    ptrdiff_t ldy) {
  constexpr int U = M == 1 ? 4 : 2;  // independent sums, which hide the latency of an addition
  Floats acc[M][U] = {};
  int i = 0;
  for (; i + U * kLanes <= k; i += U * kLanes) {
    for (int u = 0; u < U; ++u) {
      const int at = i + u * kLanes;
      const Floats weights = Elements<Type>::load_all(w + at);
      for (int r = 0; r < M; ++r) {
        acc[r][u] += load<Floats>(x + r * ldx + at) * weights;
      }
    }
  }
  for (; i + kLanes <= k; i += kLanes) {
    const Floats weights = Elements<Type>::load_all(w + i);
    for (int r = 0; r < M; ++r) {
      acc[r][0] += load<Floats>(x + r * ldx + i) * weights;
    }
  }
  if (i < k) {
    const Floats weights = Elements<Type>::load_first(w + i, k - i);
    for (int r = 0; r < M; ++r) {
      acc[r][0] += load_partial<Floats>(x + r * ldx + i, k - i) * weights;
    }
  }
  for (int r = 0; r < M; ++r) {
    Floats sums = acc[r][0];
    for (int u = 1; u < U; ++u) {
      sums += acc[r][u];
    }
    const float total = sum(sums);
    float& out = y[r * ldy];
    out = alpha * total + (beta == 0 ? 0 : beta * out);
  }
}

template <FloatType Type, int M>
void dot_rows_for_m(
    const float* x, ptrdiff_t ldx, const void* w, ptrdiff_t ldw, int n, int k, float alpha, float beta, float* y,
    ptrdiff_t ldy) {
  const auto* elements = static_cast<const typename Elements<Type>::Element*>(w);
  for (int j = 0; j < n; ++j) {
    dot_row<Type, M>(x, ldx, elements + j * ldw, k, alpha, beta, y + j, ldy);
  }
}

template <FloatType Type>
void dot_rows_for_type(
    const float* x, ptrdiff_t ldx, int m, const void* w, ptrdiff_t ldw, int n, int k, float alpha, float beta,
    float* y, ptrdiff_t ldy) {
  switch (m) {
    case 1:
      return dot_rows_for_m<Type, 1>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
    case 2:
      return dot_rows_for_m<Type, 2>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
    case 3:
      return dot_rows_for_m<Type, 3>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
    default:
      return dot_rows_for_m<Type, 4>(x, ldx, w, ldw, n, k, alpha, beta, y, ldy);
  }
}

void dot_rows(
    const float* x, ptrdiff_t ldx, int m, const void* w, FloatType type, ptrdiff_t ldw, int n, int k, float alpha,
    float beta, float* y, ptrdiff_t ldy) {
  switch (type) {
    case FloatType::float32:
      return dot_rows_for_type<FloatType::float32>(x, ldx, m, w, ldw, n, k, alpha, beta, y, ldy);
    case FloatType::float16:
      return dot_rows_for_type<FloatType::float16>(x, ldx, m, w, ldw, n, k, alpha, beta, y, ldy);
    case FloatType::bfloat16:
      return dot_rows_for_type<FloatType::bfloat16>(x, ldx, m, w, ldw, n, k, alpha, beta, y, ldy);
  }
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
