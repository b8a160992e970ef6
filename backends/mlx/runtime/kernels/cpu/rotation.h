// The rotation of the groups of a quantized KV cache.
#pragma once

#include <cmath>
#include <cstdint>

namespace executorch_mlx {

// Replaces each of `groups` groups of x by its product with the orthonormal Hadamard matrix, which is its own inverse.
inline void rotate_groups(float* x, int64_t groups, int group_size) {
  const float factor = 1 / std::sqrt(static_cast<float>(group_size));
  for (const float* end = x + groups * group_size; x < end; x += group_size) {
    for (int half = 1; half < group_size; half *= 2) {
      for (int i = 0; i < group_size; i += 2 * half) {
        for (int j = i; j < i + half; ++j) {
          const float a = x[j];
          const float b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
      }
    }
    for (int i = 0; i < group_size; ++i) {
      x[i] *= factor;
    }
  }
}

} // namespace executorch_mlx
