// Rotary embedding.
#include <cmath>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "conversion.h"
#include "rope.h"

namespace executorch_mlx {

namespace {

// What the angles of a call depend on.
struct Rotation {
  std::vector<float> frequencies;
  std::vector<int32_t> offsets; // of each sequence, or one number
  int64_t tokens;
  float scale;

  bool operator==(const Rotation&) const = default;
};

Rotation rotation_of(const kernel::Rope& p) {
  std::vector<float> frequencies(p.half);
  for (int64_t i = 0; i < p.half; ++i) {
    frequencies[i] = p.periods ? 1 / p.periods[i] : std::exp(-static_cast<float>(i) * (std::log(p.base) / p.half));
  }
  return {std::move(frequencies), std::vector(p.offsets, p.offsets + (p.offset_per_sequence ? p.batch : 1)), p.tokens,
      p.scale};
}

// The cosines and sines of the angles of each token. All heads of a token share them.
class Angles {
 public:
  explicit Angles(const Rotation& r)
      : half_(r.frequencies.size()), cosines_(r.offsets.size() * r.tokens * half_), sines_(cosines_.size()) {
    constexpr int64_t kWork = 16; // of an angle, in floats that another kernel would process meanwhile
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

  const float* cosines(int64_t token) const { return &cosines_[token * half_]; }
  const float* sines(int64_t token) const { return &sines_[token * half_]; }

 private:
  int64_t half_;
  std::vector<float> cosines_, sines_;
};

// Returns the angles of a rotation. Those of the last two rotations are kept: in a model, all layers have one or two.
std::shared_ptr<const Angles> angles_of(Rotation rotation) {
  constexpr size_t kKept = 2;
  static std::mutex mutex;
  static std::vector<std::pair<Rotation, std::shared_ptr<const Angles>>> kept; // the last one first
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

void kernel::rope(const Rope& p) {
  const auto& strides = p.x.strides;
  const auto angles = angles_of(rotation_of(p));
  const FloatType type = p.x.type;
  parallel_ranges(p.batch * p.tokens, p.heads * p.width, [&](int64_t first, int64_t last) {
    std::vector<float> copy(strides[3] == 1 ? 0 : p.width); // of a row whose elements are not contiguous
    for (int64_t i = first; i < last; ++i) {
      const int64_t b = i / p.tokens;
      const int64_t t = i % p.tokens;
      const int64_t token = p.offset_per_sequence ? i : t;
      for (int64_t h = 0; h < p.heads; ++h) {
        const void* row = at(p.x.data, type, b * strides[0] + h * strides[1] + t * strides[2]);
        if (!copy.empty()) {
          copy_row(row, type, strides[3], p.width, copy.data());
          row = copy.data();
        }
        void* to = at(p.y, type, ((b * p.heads + h) * p.tokens + t) * p.width);
        kernels().rotate(row, type, angles->cosines(token), angles->sines(token), to, p.half);
        const int64_t rotated = 2 * p.half;
        std::memcpy(at(to, type, rotated), at(row, type, rotated), (p.width - rotated) * size_of(type));
      }
    }
  });
}

} // namespace executorch_mlx
