// Products of x with weights that are not float32. If x has few rows, a kernel converts the weights to float32 in
// registers. If x has more rows, tiles of weights are converted to float32 in memory, and BLAS multiplies by them.
#include <algorithm>
#include <memory>

#include "pool.h"
#include "simd/kernels.h"

namespace executorch_mlx {

namespace {

constexpr int kFewRows = 12;         // rows of x up to which quantized_rows is faster than tiles and BLAS
constexpr int kRowsPerTask = 64;     // rows of w
constexpr int kTileBytes = 1 << 20;  // of float32 weights: few enough to stay in the L2 cache of a core
constexpr int kPadding = 16;         // floats between the rows of a tile: if the distance between rows were a power
                                     // of two, the rows would compete for the same cache lines

// Computes the product p, in which x has few rows. `w` describes the matrix of p.
void multiply_few_rows(const ExecutorchMlxQuantizedMatmul& p, const QuantizedMatrix& w) {
  const auto& simd = kernels();
  const size_t size = simd.arranged_size(w);
  const int groups = w.k / w.group_size;
  const std::unique_ptr<float[]> arranged(new float[size * p.m]);
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(groups) * p.m]);
  for (int r = 0; r < p.m; ++r) {
    simd.arrange(p.x + int64_t{r} * p.k, w, arranged.get() + r * size, sums.get() + r * groups);
  }
  parallel((p.n + kRowsPerTask - 1) / kRowsPerTask, [&](int i) {
    const int first = i * kRowsPerTask;
    const int last = std::min(p.n, first + kRowsPerTask);
    for (int r = 0; r < p.m; r += kMaxRows) {
      simd.quantized_rows(
          w, arranged.get() + r * size, sums.get() + r * groups, std::min(kMaxRows, p.m - r), first, last,
          p.y + int64_t{r} * p.n, p.n);
    }
  });
}

// Computes y [m, n] = x [m, k] @ w.T. convert(first, last, to, stride) writes rows [first, last) of w [n, k] as float32
// to `to`, where each row begins `stride` floats after the previous one.
template <typename Convert>
void multiply_tiles(const float* x, int m, int n, int k, float* y, Convert&& convert) {
  const int tile_rows = std::clamp(kTileBytes / (k * 4) / 16 * 16, 16, 512);
  parallel((n + tile_rows - 1) / tile_rows, [&](int i) {
    const int first = i * tile_rows;
    const int last = std::min(n, first + tile_rows);
    static thread_local std::unique_ptr<float[]> tile;
    static thread_local size_t tile_size = 0;
    const int stride = k + kPadding;
    const size_t needed = static_cast<size_t>(tile_rows) * stride;
    if (tile_size < needed) {
      tile.reset(new float[needed]);
      tile_size = needed;
    }
    convert(first, last, tile.get(), stride);
    cblas_sgemm(
        kRowMajor, kNoTranspose, kTranspose, m, last - first, k, 1, x, k, tile.get(), stride, 0, y + first, n);
  });
}

} // namespace

} // namespace executorch_mlx

extern "C" bool executorch_mlx_supports_quantized(int bits, int group_size, int k) {
  return (bits == 2 || bits == 4 || bits == 8) && (group_size == 32 || group_size == 64 || group_size == 128) &&
      k % group_size == 0 && k / group_size <= executorch_mlx::kMaxGroups;
}

extern "C" void executorch_mlx_quantized_matmul(const ExecutorchMlxQuantizedMatmul* p) {
  using namespace executorch_mlx;
  const QuantizedMatrix w{p->w, p->scales, p->biases, p->scale_type, p->bits, p->group_size, p->k};
  if (p->m <= kFewRows) {
    return multiply_few_rows(*p, w);
  }
  multiply_tiles(p->x, p->m, p->n, p->k, p->y, [&](int first, int last, float* to, int stride) {
    kernels().dequantize_rows(w, first, last, to, stride);
  });
}

extern "C" void executorch_mlx_half_matmul(const ExecutorchMlxHalfMatmul* p) {
  using namespace executorch_mlx;
  if (p->m <= kMaxRows && p->column_stride == 1) {
    return parallel((p->n + kRowsPerTask - 1) / kRowsPerTask, [&](int i) {
      const int first = i * kRowsPerTask;
      const int count = std::min(p->n - first, kRowsPerTask);
      kernels().dot_rows(
          p->x, p->k, p->m, p->w + first * p->row_stride, p->type, p->row_stride, count, p->k, 1, 0, p->y + first,
          p->n);
    });
  }
  multiply_tiles(p->x, p->m, p->n, p->k, p->y, [&](int first, int last, float* to, int stride) {
    for (int row = first; row < last; ++row) {
      kernels().widen(
          p->w + row * p->row_stride, p->type, p->column_stride, to + int64_t{row - first} * stride, p->k);
    }
  });
}
