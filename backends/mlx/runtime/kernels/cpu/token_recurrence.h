// Recurrences over tokens.
#pragma once

#include <cstdint>

#include "api.h"

namespace executorch_mlx::kernel {

// A vector of floats for each token and head, [batch, heads, tokens, width], with any strides.
struct Tokens {
  const float* data;
  int64_t strides[4];
};

// For each token: state = exp(decay) * state, then state += key ⊗ error, then y = query @ state. The error is the
// value, or beta * (value - key @ state) if there is beta. Consecutive heads share one of the `groups` queries and
// keys.
struct GatedRecurrence {
  Tokens query; // of `groups` heads, [size]
  Tokens key; // of `groups` heads, [size]
  Tokens value; // [columns]
  Tokens decay; // [size] if `decays_by_channel`, else one number
  Tokens beta; // one number; the data may be null
  bool decays_by_channel;
  int64_t batch;
  int64_t heads;
  int64_t groups;
  int64_t tokens;
  int64_t size;
  int64_t columns;
  const float* state; // [batch, heads, size, columns]
  float* next; // the state after the last token, like `state`
  bool is_transposed; // both states are [batch, heads, columns, size]; then `size` is a multiple of 16
  float* y; // [batch, tokens, heads, columns]
};
EXECUTORCH_MLX_KERNEL_API void gated_recurrence(const GatedRecurrence& recurrence);

// For each token and channel: state = exp(step * rates) * state + step * x * key, then y = state @ query. The second
// axis of the tokens has one index.
struct SelectiveScan {
  Tokens x; // [channels]
  Tokens step; // [channels]
  Tokens key; // [size]
  Tokens query; // [size]
  const float* rates; // [channels, size]
  int64_t batch;
  int64_t tokens;
  int64_t channels;
  int64_t size;
  const float* state; // [batch, channels, size]
  float* next; // the state after the last token
  float* y; // [batch, tokens, channels]
};
EXECUTORCH_MLX_KERNEL_API void selective_scan(const SelectiveScan& scan);

// to[i] = from[i] for `rows` rows of `bytes` bytes. A null pointer in `from` stands for zeros.
EXECUTORCH_MLX_KERNEL_API void copy_rows(const void* const* from, int64_t rows, int64_t bytes, void* to);

} // namespace executorch_mlx::kernel
