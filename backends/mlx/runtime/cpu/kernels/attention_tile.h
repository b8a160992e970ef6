// What attention over float and over quantized caches share. The rows of a head of the keys are the queries of all heads of
// q that share these keys: first those of query 0, then those of query 1, and so on.
#pragma once

#include <algorithm>
#include <cstdint>

#include "conversion.h"

namespace executorch_mlx {

// The rows first ... first + count - 1 of one head of the keys. The functions take the number of a row in the tile.
struct AttentionTile {
  int64_t batch;
  int64_t kv_head;
  int64_t first;
  int64_t count;
  int64_t group;  // heads of q that share the head of the keys

  int64_t query(int64_t row) const {
    return (first + row) / group;
  }
  int64_t head(int64_t row) const {
    return kv_head * group + (first + row) % group;
  }
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

} // namespace executorch_mlx
