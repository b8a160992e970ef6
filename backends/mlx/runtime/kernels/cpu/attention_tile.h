// What attention over float and over quantized caches share. The rows of a head of the keys are the queries of all
// heads of q that share these keys: first those of query 0, then those of query 1, and so on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "conversion.h"

namespace executorch_mlx {

// The rows first ... first + count - 1 of one head of the keys. The functions take the number of a row in the tile.
struct AttentionTile {
  int64_t batch;
  int64_t kv_head;
  int64_t first;
  int64_t count;
  int64_t group; // heads of q that share the head of the keys

  int64_t query(int64_t row) const { return (first + row) / group; }
  int64_t head(int64_t row) const { return kv_head * group + (first + row) % group; }
};

// The number of keys that a row sees, without regard to a mask.
template <typename Attention>
int64_t visible_keys(const Attention& a, const AttentionTile& tile, int64_t row) {
  return a.causal ? std::min(a.keys, tile.query(row) + 1 + a.keys - a.queries) : a.keys;
}

// Writes `width` elements of `type`, with the distance `stride` between them, to `to` in float32.
inline void read_as_float32(const void* from, FloatType type, int64_t stride, int64_t width, float* to) {
  if (type != FloatType::float32) {
    return kernels().widen(static_cast<const uint16_t*>(from), type, stride, to, width);
  }
  for (int64_t i = 0; i < width; ++i) {
    to[i] = static_cast<const float*>(from)[i * stride];
  }
}

// Recomputes those rows of the outputs y [rows, width] that contain NaN, with zeros in place of the values of weight 0.
// These are values that a row does not see. The product of all weights with the values multiplies them, too, and the
// product of 0 and an infinite value is NaN. weights [rows, keys] has the distance `stride` between rows.
// read_value(key, to) writes the `width` elements of a value, of `type`. multiply(weights, values, y) computes a row.
template <typename ReadValue, typename Multiply>
void leave_out_unseen_keys(int64_t rows, int64_t keys, const float* weights, int64_t stride, FloatType type,
    int64_t width, float* y, ReadValue&& read_value, Multiply&& multiply) {
  static thread_local std::vector<float> values;
  for (int64_t row = 0; row < rows; ++row, weights += stride, y += width) {
    if (!kernels().has_nan(y, width)) {
      continue;
    }
    values.assign(keys * width, 0.0f);
    for (int64_t key = 0; key < keys; ++key) {
      if (weights[key] != 0) {
        read_value(key, at(values.data(), type, key * width));
      }
    }
    multiply(weights, values.data(), y);
  }
}

} // namespace executorch_mlx
