// The format of quantized KV caches, which custom_ops/quantized_cache.py defines.
#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

struct EntryFormat {
  int group_size;
  int bits;
  bool rotate;

  int groups(int width) const {
    return (width + group_size - 1) / group_size;
  }
  int bytes(int groups) const {
    return groups * group_size * bits / 8;
  }
};

// The quantized entries uint8 [B, G, N, bytes], and their scales and biases [B, G, N, 2 * groups].
struct QuantizedEntries {
  mx::array entries;
  mx::array scales;
};

// Attention of q [1, H, S, D] over the entries [first, last) of a cache.
struct QuantizedAttention {
  mx::array q;
  QuantizedEntries cache;
  EntryFormat format;
  int first;
  int last;
  int value_group;  // the group of an entry at which the values begin
  int value_size;
  float scale;
  bool causal;
  std::optional<mx::array> mask;
};

} // namespace executorch_mlx
