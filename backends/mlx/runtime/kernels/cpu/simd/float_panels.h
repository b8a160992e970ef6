// Products of float32 rows x with the rows of a matrix w: y = x @ w.T. Part of kernels.cpp.
//
// The order of summation is that of columns.h: each result adds the products in ascending order of k. A panel holds
// three vectors of rows of w, transposed: [k, rows], with zeros in place of missing rows. A lane therefore holds the
// result of one row of w, and a kernel reads a panel from its beginning to its end.
#pragma once

#include "transposed.h"
#include "vector_functions.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kFloatPanelVectors = 3;
constexpr int kFloatPanelRows = kFloatPanelVectors * kLanes;
constexpr int kFloatTileRows = kRegisters == 32 ? 8 : 4; // of x
constexpr int kMaxPrefetchingTiles = 3; // that prefetch the next panel, a part each

constexpr int vectors_of(int columns) { return (columns + kLanes - 1) / kLanes; }

void pack_float_panel(const float* w, ptrdiff_t ldw, int rows, int k, float* panel) {
  const int width = vectors_of(rows) * kLanes;
  for (int j = 0; j < rows; j += kLanes) {
    const int count = rows - j < kLanes ? rows - j : kLanes;
    for (int i = 0; i < k; i += kLanes) {
      Floats v[kLanes];
      const int columns = k - i < kLanes ? k - i : kLanes;
      for (int r = 0; r < kLanes; ++r) {
        v[r] = r < count ? load_lanes(w + (j + r) * ldw + i, columns) : Floats{};
      }
      transpose(v);
      for (int c = 0; c < columns; ++c) {
        store(v[c], panel + ptrdiff_t{i + c} * width + j);
      }
    }
  }
}

// Whether the results are not complete after store_result().
inline bool needs_second_pass(const FloatResults& to) {
  return to.activation != Elementwise::copy || to.residual != nullptr;
}

// The results from this row on.
inline FloatResults from_row(FloatResults results, ptrdiff_t row) {
  results.y += row * results.ldy;
  results.addend += results.addend == nullptr ? 0 : row * results.ld_addend;
  results.residual += results.residual == nullptr ? 0 : row * results.ldy;
  return results;
}

// alpha * total + beta * old + addend, for `count` lanes of a row.
inline void store_result(Floats total, const FloatResults& to, ptrdiff_t row, ptrdiff_t column, int count) {
  float* const y = to.y + row * to.ldy + column;
  Floats result = to.alpha * total;
  if (to.beta != 0) {
    result = multiply_add(broadcast(to.beta), load_lanes(y, count), result);
  }
  if (to.addend != nullptr) {
    result += load_lanes(to.addend + row * to.ld_addend + column, count);
  }
  store_lanes(result, y, count);
}

// Calls run(function) with the function of an activation.
template <typename Run>
inline void with_activation(Elementwise operation, Run&& run) {
  switch (operation) {
    case Elementwise::gelu:
      return run([](Floats v) { return gelu_of(v); });
    case Elementwise::gelu_tanh:
      return run([](Floats v) { return gelu_tanh_of(v); });
    case Elementwise::silu:
      return run([](Floats v) { return silu_of(v); });
    case Elementwise::maximum:
      return run([](Floats v) { return maximum_of(v, Floats{}); });
    default:
      return run([](Floats v) { return v; });
  }
}

// Applies the activation to the results of a tile, which are in the cache, and then adds the residual.
__attribute__((noinline)) void finish_tile(const FloatResults& to, int rows, int columns) {
  with_activation(to.activation, [&](auto function) {
    for (int r = 0; r < rows; ++r) {
      for (int j = 0; j < columns; j += kLanes) {
        const int count = columns - j < kLanes ? columns - j : kLanes;
        float* const y = to.y + r * to.ldy + j;
        Floats result = function(load_lanes(y, count));
        if (to.residual != nullptr) {
          result += load_lanes(to.residual + r * to.ldy + j, count);
        }
        store_lanes(result, y, count);
      }
    }
  });
}

void finish_float_results(const float* totals, ptrdiff_t ld, int rows, int columns, const FloatResults& to) {
  for (int r = 0; r < rows; ++r) {
    for (int j = 0; j < columns; j += kLanes) {
      const int count = columns - j < kLanes ? columns - j : kLanes;
      store_result(load_lanes(totals + r * ld + j, count), to, r, j, count);
    }
  }
  if (needs_second_pass(to)) {
    finish_tile(to, rows, columns);
  }
}

// Computes M rows of V vectors. At each step, prefetches `lines` cache lines from `ahead` on.
template <int M, int V>
__attribute__((noinline)) void float_panel_tile(const float* x, ptrdiff_t ldx, const float* w, int k, int columns,
    const FloatResults& to, const char* ahead, int lines) {
  constexpr ptrdiff_t kCacheLine = 64;
  // Otherwise, the stores at the end, or the loads of the residual, delay the next tile.
  for (int r = 0; r < M; ++r) {
    for (int j = 0; j < columns; j += static_cast<int>(kCacheLine / 4)) {
      prefetch(to.y + r * to.ldy + j);
      if (to.residual != nullptr) {
        prefetch(to.residual + r * to.ldy + j);
      }
    }
  }
  Floats acc[M][V];
  // Without repeat(), the compiler clears the array in memory.
  repeat<M * V>([&](auto i) { acc[decltype(i)::value / V][decltype(i)::value % V] = Floats{}; });
  for (int i = 0; i < k; ++i, w += V * kLanes) {
    for (int line = 0; line < lines; ++line, ahead += kCacheLine) {
      prefetch(ahead);
    }
    Floats weights[V];
    for (int v = 0; v < V; ++v) {
      weights[v] = load<Floats>(w + v * kLanes);
    }
    for (int r = 0; r < M; ++r) {
      const Floats element = broadcast(x[r * ldx + i]);
      for (int v = 0; v < V; ++v) {
        acc[r][v] = multiply_add(element, weights[v], acc[r][v]);
      }
    }
  }
  repeat<M>([&](auto r) {
    repeat<V>([&](auto v) {
      const int left = columns - v.value * kLanes;
      store_result(acc[r.value][v.value], to, r.value, v.value * kLanes, left < kLanes ? left : kLanes);
    });
  });
  if (needs_second_pass(to)) {
    finish_tile(to, M, columns);
  }
}

void multiply_float_panel(const float* x, ptrdiff_t ldx, int m, const float* w, int columns, int k,
    const FloatResults& to, const float* ahead) {
  call_with_constant<kFloatPanelVectors>(vectors_of(columns), [&](auto vectors) {
    constexpr int V = decltype(vectors)::value;
    const int tiles = (m + kFloatTileRows - 1) / kFloatTileRows;
    const int prefetching = ahead == nullptr ? 0 : tiles < kMaxPrefetchingTiles ? tiles : kMaxPrefetchingTiles;
    const int lines = prefetching == 0 ? 0 : (V * kLanes * 4 + 64 * prefetching - 1) / (64 * prefetching);
    const char* next = reinterpret_cast<const char*>(ahead);
    for_row_tiles<kFloatTileRows>(m, [&](auto rows, int first) {
      const int tile = first / kFloatTileRows;
      float_panel_tile<decltype(rows)::value, V>(
          x + first * ldx, ldx, w, k, columns, from_row(to, first), next, tile < prefetching ? lines : 0);
      next += ptrdiff_t{lines} * k * 64;
    });
  });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
