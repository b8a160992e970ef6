// What the trials of kernels share: inputs that are the same on every device, and tolerances.
#pragma once

#include <mlx/mlx.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../call/evaluation.h"

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

inline constexpr float kEps = 1e-5f;
inline constexpr int kRepetitions = 4; // of the work of a race, so that it takes longer than to submit it

// The errors of right kernels: a few units in the last place of the largest element.
inline constexpr double kToleranceOfHalf = 0.03; // bfloat16 has 8 bits
inline constexpr double kToleranceOfFloat = 1e-4;

template <typename T>
T expect(std::optional<T> result, const char* function) {
  if (!result) {
    throw std::runtime_error(std::string(function) + ": the kernel does not take the inputs of the trial");
  }
  return *std::move(result);
}

// Numbers that are the same on every device: SplitMix64, and sums of four uniform numbers as approximate normal ones.
class Numbers {
 public:
  float normal() {
    const uint64_t bits = next();
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      sum += static_cast<float>(bits >> 16 * i & 0xFFFF) / 65536.0f - 0.5f;
    }
    return sum * std::sqrt(3.0f);
  }

  std::vector<float> normals(size_t count) {
    std::vector<float> result(count);
    for (float& x : result) {
      x = normal();
    }
    return result;
  }

  // An evaluated array of normal numbers times `scale`.
  mx::array array(const mx::Shape& shape, mx::Dtype dtype, mx::Stream stream, float scale = 1.0f) {
    size_t count = 1;
    for (const int size : shape) {
      count *= size;
    }
    auto values = normals(count);
    for (float& x : values) {
      x *= scale;
    }
    const auto x = mx::astype(mx::array(values.data(), shape, mx::float32), dtype, stream);
    evaluate({x}, stream);
    return x;
  }

 private:
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }

  uint64_t state_ = 54;
};

// An evaluated array, for races, in which the numbers do not matter.
inline mx::array filled(const mx::Shape& shape, mx::Dtype dtype, mx::Stream stream) {
  const auto x = mx::full(shape, 0.01f, dtype, stream);
  evaluate({x}, stream);
  return x;
}

inline mx::array silu(const mx::array& x, mx::Stream stream) { return mx::multiply(x, mx::sigmoid(x, stream), stream); }

} // namespace executorch_mlx::gpu
