// Attention.
#pragma once

#include <cstdint>

#include "api.h"
#include "heads.h"

namespace executorch_mlx::kernel {

// softmax(scale * q @ k.T + mask) @ v for q [batch, heads, queries, width], k [batch, kv_heads, keys, width] and
// v [batch, kv_heads, keys, v_width]. heads / kv_heads consecutive heads of q share a head of k and v. At most one of
// the two masks is set. If a bool mask or `causal` hides all keys from a query, all keys have the same weight for this
// query, as in MLX. The result y [batch, queries, heads, v_width] has the heads of a query side by side, as the next
// product reads them. It has the type of q.
struct Attention {
  Heads q;
  Heads k;
  Heads v;
  int64_t batch;
  int64_t heads;
  int64_t kv_heads;
  int64_t queries;
  int64_t keys;
  int64_t width;
  int64_t v_width;
  bool causal; // if true, the last query sees all keys, and each query one key less than the next one
  bool zero_if_unseen; // if true, a query from which bool_mask hides all keys gets zeros
  const bool* bool_mask; // whether a query sees a key; may be null
  const float* float_mask; // added to the scores; may be null
  int64_t mask_strides[4];
  float scale;
  void* y;
};

// `count` attentions at once. Each result has the same bits as in a call of its own.
EXECUTORCH_MLX_KERNEL_API void attention(const Attention* attentions, int count);

} // namespace executorch_mlx::kernel
