// Quantized KV caches: custom_ops/quantized_cache.py defines the format.
#pragma once

#include <cstdint>

#include "api.h"
#include "heads.h"

namespace executorch_mlx::kernel {

// The parts of a quantized KV cache of one sequence. Strides count bytes of the entries, and elements of the scales. An
// entry has `groups` groups; its biases follow its scales.
struct Entries {
  uint8_t* entries;
  int64_t entry_strides[2]; // between heads, and between entries
  void* scales;
  FloatType scale_type;
  int64_t scale_strides[2];
  int64_t groups;
  int bits; // 4 or 8
  int group_size; // 32, 64 or 128
  bool rotate;
};

// Quantizes x [heads, tokens, width], padded with zeros to whole groups, and writes it to the groups of the entries
// from `first_group` on. The first stride of x is not used.
struct QuantizeEntries {
  Heads x;
  int64_t heads;
  int64_t tokens;
  int64_t width;
  Entries to;
  int64_t first_group;
};
EXECUTORCH_MLX_KERNEL_API void quantize_entries(const QuantizeEntries& quantize);

// Attention of q [heads, queries, width] over `keys` entries. The keys are the first `width` numbers of an entry. The
// values are `value_size` numbers from group `value_group` on. The masks are as in Attention, but each
// query sees at least one key. The result y [queries, heads, value_size] has the type of q. The first strides of q and
// of the mask are not used.
struct QuantizedAttention {
  Heads q;
  Entries cache;
  int64_t heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t width;
  int64_t value_group;
  int64_t value_size;
  bool causal;
  const bool* bool_mask;
  const float* float_mask;
  int64_t mask_strides[4];
  float scale;
  void* y;
};
EXECUTORCH_MLX_KERNEL_API void quantized_attention(const QuantizedAttention& attention);

} // namespace executorch_mlx::kernel
