// The format of quantized KV caches, which custom_ops/quantized_cache.py defines.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// How the entries of a cache are quantized.
struct EntryFormat {
  int group_size;
  int bits;
  bool rotate; // whether each group is rotated before it is quantized

  // The number of groups that hold `width` values.
  int groups(int width) const { return static_cast<int>((int64_t{width} + group_size - 1) / group_size); }
  // The size of this many quantized groups, without scales and biases.
  int bytes(int groups) const { return groups * group_size * bits / 8; }
};

// The entries of N positions and G key heads. `entries` is uint8 [B, G, N, bytes]. `scales` [B, G, N, 2 * groups] has
// the scales of the groups, then their biases.
struct QuantizedEntries {
  mx::array entries;
  mx::array scales;
};

// Attention of q [1, H, S, D] over the positions [first, last) of a cache.
struct QuantizedAttention {
  mx::array q;
  QuantizedEntries cache;
  EntryFormat format;
  int first;
  int last;
  int value_group; // the group of an entry at which the values begin
  int value_size;
  float scale;
  bool causal;
  std::optional<mx::array> mask;
};

} // namespace executorch_mlx
