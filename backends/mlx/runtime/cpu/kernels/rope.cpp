#include <cmath>
#include <cstring>
#include <vector>

#include "conversion.h"

extern "C" void executorch_mlx_rope(const ExecutorchMlxRope* rope) {
  using namespace executorch_mlx;
  const auto& p = *rope;
  const auto& strides = p.x.strides;
  std::vector<float> frequencies(p.half);
  for (int64_t i = 0; i < p.half; ++i) {
    frequencies[i] = p.periods ? 1 / p.periods[i] : std::exp(-static_cast<float>(i) * (std::log(p.base) / p.half));
  }
  const int64_t rotated_width = 2 * p.half;
  // The angles depend on the token only, so all attention heads of a token share their cosines and sines.
  parallel_ranges(p.batch * p.tokens, p.heads * p.width, [&](int64_t first, int64_t last) {
    std::vector<float> cosines(p.half), sines(p.half);
    const bool is_float32 = p.x.type == FloatType::float32;
    // A row of x in contiguous float32. Empty if the rows of x have this form already.
    std::vector<float> copy(is_float32 && strides[3] == 1 ? 0 : p.width);
    // A row of the result in float32. Empty if y is float32: the result is then written to y directly.
    std::vector<float> rotated_row(is_float32 ? 0 : p.width);
    for (int64_t i = first; i < last; ++i) {
      const int64_t b = i / p.tokens;
      const int64_t t = i % p.tokens;
      const float position = static_cast<float>(p.offsets[p.offset_per_sequence ? b : 0] + t) * p.scale;
      for (int64_t j = 0; j < p.half; ++j) {
        cosines[j] = std::cos(position * frequencies[j]);
        sines[j] = std::sin(position * frequencies[j]);
      }
      for (int64_t h = 0; h < p.heads; ++h) {
        const void* row = at(p.x.data, p.x.type, b * strides[0] + h * strides[1] + t * strides[2]);
        const int64_t index = ((b * p.heads + h) * p.tokens + t) * p.width;
        if (!is_float32) {
          kernels().widen(static_cast<const uint16_t*>(row), p.x.type, strides[3], copy.data(), p.width);
        } else {
          for (size_t j = 0; j < copy.size(); ++j) {
            copy[j] = static_cast<const float*>(row)[static_cast<int64_t>(j) * strides[3]];
          }
        }
        const float* from = copy.empty() ? static_cast<const float*>(row) : copy.data();
        float* to = is_float32 ? static_cast<float*>(p.y) + index : rotated_row.data();
        kernels().rotate(from, cosines.data(), sines.data(), to, p.half);
        std::memcpy(to + rotated_width, from + rotated_width, (p.width - rotated_width) * sizeof(float));
        if (!is_float32) {
          kernels().narrow(to, p.x.type, static_cast<uint16_t*>(p.y) + index, p.width);
        }
      }
    }
  });
}
