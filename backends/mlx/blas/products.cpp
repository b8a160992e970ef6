// Products with weights that are no float32: quantized ones are unpacked on the way to a few rows of x;
// for many rows, and in half precision, they are made float32 tile by tile and multiplied by the BLAS.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace executorch_mlx {

namespace {

struct Choice {
  const char* name;
  const Kernels* kernels;
};

// What this processor runs, the best first.
std::vector<Choice> choices() {
  std::vector<Choice> result;
#if EXECUTORCH_MLX_X86_KERNELS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    result.push_back({"avx512", &avx512::kernels});
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    result.push_back({"avx2", &avx2::kernels});
  }
#endif
  result.push_back({"portable", &portable::kernels});
  return result;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{choices().front().kernels};
  return kernels;
}

} // namespace

const Kernels& kernels() {
  return *chosen().load(std::memory_order_relaxed);
}

namespace {

constexpr int kFewRows = 12;          // of x: above, unpacking once and a real product are faster
constexpr int kRowsAtATime = 64;      // of w, that a thread takes
constexpr int kTileBytes = 1 << 20;   // of weights made float32: they stay in a core's own cache
constexpr int kPadding = 16;          // rows that are powers of two apart would share a few lines of it

void few_rows(const ExecutorchMlxQuantized& p, const QuantizedRows& q) {
  const auto& run = kernels();
  const size_t size = run.arranged_size(q);
  const int groups = q.k / q.group_size;
  const std::unique_ptr<float[]> arranged(new float[size * p.m]);
  const std::unique_ptr<float[]> sums(new float[static_cast<size_t>(groups) * p.m]);
  for (int r = 0; r < p.m; ++r) {
    run.arrange(p.x + int64_t{r} * p.k, q, arranged.get() + r * size, sums.get() + r * groups);
  }
  parallel((p.n + kRowsAtATime - 1) / kRowsAtATime, [&](int i) {
    const int first = i * kRowsAtATime;
    const int last = std::min(p.n, first + kRowsAtATime);
    for (int r = 0; r < p.m; r += kMostRows) {
      run.quantized_rows(
          q, arranged.get() + r * size, sums.get() + r * groups, std::min(kMostRows, p.m - r), first, last,
          p.y + int64_t{r} * p.n, p.n);
    }
  });
}

// y [m, n] = x [m, k] times the transpose of w [n, k]: fill(first, last, to, step) writes rows of w,
// `step` apart, for the BLAS.
template <typename Fill>
void by_tiles(const float* x, int m, int n, int k, float* y, Fill&& fill) {
  const int tile = std::clamp(kTileBytes / (k * 4) / 16 * 16, 16, 512);
  parallel((n + tile - 1) / tile, [&](int i) {
    const int first = i * tile;
    const int last = std::min(n, first + tile);
    static thread_local std::unique_ptr<float[]> room;
    static thread_local size_t room_size = 0;
    const int step = k + kPadding;
    const size_t needed = static_cast<size_t>(tile) * step;
    if (room_size < needed) {
      room.reset(new float[needed]);
      room_size = needed;
    }
    fill(first, last, room.get(), step);
    cblas_sgemm(101, 111, 112, m, last - first, k, 1, x, k, room.get(), step, 0, y + first, n);
  });
}

} // namespace

} // namespace executorch_mlx

extern "C" bool executorch_mlx_quantized_is_fast(int bits, int group_size, int k) {
  return (bits == 2 || bits == 4 || bits == 8) && (group_size == 32 || group_size == 64 || group_size == 128) &&
      k % group_size == 0 && k / group_size <= 1024;
}

extern "C" void executorch_mlx_quantized_product(const ExecutorchMlxQuantized* p) {
  using namespace executorch_mlx;
  const QuantizedRows q{
      p->w, p->scales, p->biases, static_cast<FloatType>(p->scale_type), p->bits, p->group_size, p->k};
  if (p->m <= kFewRows) {
    return few_rows(*p, q);
  }
  by_tiles(p->x, p->m, p->n, p->k, p->y, [&](int first, int last, float* to, int step) {
    kernels().dequantize_rows(q, first, last, to, step);
  });
}

extern "C" void executorch_mlx_half_product(const ExecutorchMlxHalf* p) {
  using namespace executorch_mlx;
  const auto type = static_cast<FloatType>(p->type);
  if (p->m <= kMostRows && p->column == 1) {
    return parallel((p->n + kRowsAtATime - 1) / kRowsAtATime, [&](int i) {
      const int first = i * kRowsAtATime;
      const int count = std::min(p->n - first, kRowsAtATime);
      kernels().dot_rows(
          p->x, p->k, p->m, p->w + first * p->row, type, p->row, count, p->k, 1, 0, p->y + first, p->n);
    });
  }
  by_tiles(p->x, p->m, p->n, p->k, p->y, [&](int first, int last, float* to, int step) {
    for (int row = first; row < last; ++row) {
      kernels().widen(p->w + row * p->row, type, p->column, to + int64_t{row - first} * step, p->k);
    }
  });
}

extern "C" bool executorch_mlx_use_kernels(const char* name) {
  using namespace executorch_mlx;
  for (const auto& choice : choices()) {
    if (std::strcmp(choice.name, name) == 0) {
      chosen().store(choice.kernels, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}
