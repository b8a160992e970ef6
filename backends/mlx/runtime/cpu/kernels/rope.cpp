// Rotary embedding: see blas.h.
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "conversion.h"

namespace executorch_mlx {

namespace {

// What the angles of a call depend on.
struct Rotation {
  std::vector<float> frequencies;
  std::vector<int32_t> offsets;  // of each sequence, or one number
  int64_t tokens;
  float scale;

  bool operator==(const Rotation&) const = default;
};

Rotation rotation_of(const ExecutorchMlxRope& p) {
  std::vector<float> frequencies(p.half);
  for (int64_t i = 0; i < p.half; ++i) {
    frequencies[i] = p.periods ? 1 / p.periods[i] : std::exp(-static_cast<float>(i) * (std::log(p.base) / p.half));
  }
  return {
      std::move(frequencies), std::vector(p.offsets, p.offsets + (p.offset_per_sequence ? p.batch : 1)), p.tokens,
      p.scale};
}

// The cosines and sines of the angles of each token. All heads of a token share them.
class Angles {
 public:
  explicit Angles(const Rotation& r)
      : half_(r.frequencies.size()), cosines_(r.offsets.size() * r.tokens * half_), sines_(cosines_.size()) {
    constexpr int64_t kWork = 16;  // of an angle, in floats that another kernel would process meanwhile
    parallel_ranges(r.offsets.size() * r.tokens, half_ * kWork, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const float position = static_cast<float>(r.offsets[i / r.tokens] + i % r.tokens) * r.scale;
        for (int64_t j = 0; j < half_; ++j) {
          cosines_[i * half_ + j] = std::cos(position * r.frequencies[j]);
          sines_[i * half_ + j] = std::sin(position * r.frequencies[j]);
        }
      }
    });
  }

  const float* cosines(int64_t token) const {
    return &cosines_[token * half_];
  }
  const float* sines(int64_t token) const {
    return &sines_[token * half_];
  }

 private:
  int64_t half_;
  std::vector<float> cosines_, sines_;
};

// Returns the angles of a rotation. Those of the last two rotations are kept: in a model, all layers have one or two.
std::shared_ptr<const Angles> angles_of(Rotation rotation) {
  constexpr size_t kKept = 2;
  static std::mutex mutex;
  static std::vector<std::pair<Rotation, std::shared_ptr<const Angles>>> kept;  // the last one first
  {
    std::lock_guard lock(mutex);
    for (const auto& [r, angles] : kept) {
      if (r == rotation) {
        return angles;
      }
    }
  }
  auto angles = std::make_shared<const Angles>(rotation);
  std::lock_guard lock(mutex);
  kept.emplace(kept.begin(), std::move(rotation), angles);
  if (kept.size() > kKept) {
    kept.pop_back();
  }
  return angles;
}

} // namespace

} // namespace executorch_mlx

extern "C" void executorch_mlx_rope(const ExecutorchMlxRope* rope) {
  using namespace executorch_mlx;
  const auto& p = *rope;
  const auto& strides = p.x.strides;
  const int64_t rotated_width = 2 * p.half;
  const auto angles = angles_of(rotation_of(p));
  parallel_ranges(p.batch * p.tokens, p.heads * p.width, [&](int64_t first, int64_t last) {
    const bool is_float32 = p.x.type == FloatType::float32;
    // A row of x in contiguous float32. Empty if the rows of x have this form already.
    std::vector<float> copy(is_float32 && strides[3] == 1 ? 0 : p.width);
    // A row of the result in float32. Empty if y is float32: the result is then written to y directly.
    std::vector<float> rotated_row(is_float32 ? 0 : p.width);
    for (int64_t i = first; i < last; ++i) {
      const int64_t b = i / p.tokens;
      const int64_t t = i % p.tokens;
      const int64_t token = p.offset_per_sequence ? i : t;
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
        kernels().rotate(from, angles->cosines(token), angles->sines(token), to, p.half);
        std::memcpy(to + rotated_width, from + rotated_width, (p.width - rotated_width) * sizeof(float));
        if (!is_float32) {
          kernels().narrow(to, p.x.type, static_cast<uint16_t*>(p.y) + index, p.width);
        }
      }
    }
  });
}
