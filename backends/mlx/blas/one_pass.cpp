// RMSNorm, SiLU and rotary embedding, shared out among the threads where there is enough of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace executorch_mlx {

namespace {

constexpr int64_t kShare = 16 << 10;  // numbers that are worth a thread

// run(first, last) for pieces of `count` things of `size` numbers each.
template <typename Run>
void share_out(int64_t count, int64_t size, Run&& run) {
  const int64_t piece = std::max<int64_t>(1, kShare / std::max<int64_t>(1, size));
  const int pieces = static_cast<int>((count + piece - 1) / piece);
  if (pieces <= 1) {
    return run(0, count);
  }
  parallel(pieces, [&](int i) { run(i * piece, std::min(count, (i + 1) * piece)); });
}

} // namespace

} // namespace executorch_mlx

extern "C" void executorch_mlx_silu(const float* x, float* y, int64_t count) {
  using namespace executorch_mlx;
  share_out(count, 1, [&](int64_t first, int64_t last) { kernels().silu(x + first, y + first, last - first); });
}

extern "C" void executorch_mlx_rms_norm(
    const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
  using namespace executorch_mlx;
  share_out(rows, width, [&](int64_t first, int64_t last) {
    kernels().rms_norm(x + first * width, weight, y + first * width, last - first, width, eps);
  });
}

extern "C" void executorch_mlx_rope(const ExecutorchMlxRope* rope) {
  using namespace executorch_mlx;
  const auto& p = *rope;
  std::vector<float> per_position(p.half);
  for (int64_t i = 0; i < p.half; ++i) {
    per_position[i] = p.periods ? 1 / p.periods[i] : std::exp(-static_cast<float>(i) * (std::log(p.base) / p.half));
  }
  const int64_t turned = 2 * p.half;
  share_out(p.batch * p.tokens, p.heads * p.width, [&](int64_t first, int64_t last) {
    std::vector<float> angles(turned);  // cosines, then sines
    std::vector<float> together(p.strides[3] == 1 ? 0 : p.width);
    for (int64_t i = first; i < last; ++i) {
      const int64_t b = i / p.tokens;
      const int64_t t = i % p.tokens;
      const float position = static_cast<float>(p.offsets[p.offset_for_each ? b : 0] + t) * p.scale;
      for (int64_t j = 0; j < p.half; ++j) {
        angles[j] = std::cos(position * per_position[j]);
        angles[p.half + j] = std::sin(position * per_position[j]);
      }
      for (int64_t h = 0; h < p.heads; ++h) {
        const float* from = p.x + b * p.strides[0] + h * p.strides[1] + t * p.strides[2];
        for (size_t j = 0; j < together.size(); ++j) {
          together[j] = from[static_cast<int64_t>(j) * p.strides[3]];
        }
        from = together.empty() ? from : together.data();
        float* to = p.y + ((b * p.heads + h) * p.tokens + t) * p.width;
        kernels().rotate(from, angles.data(), angles.data() + p.half, to, p.half);
        std::memcpy(to + turned, from + turned, (p.width - turned) * sizeof(float));
      }
    }
  });
}
