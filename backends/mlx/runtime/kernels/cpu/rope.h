// Rotary embedding.
#pragma once

#include <cstdint>

#include "api.h"
#include "heads.h"

namespace executorch_mlx::kernel {

// Rotary position embedding of x [batch, heads, tokens, width]. Rotates the pairs (x[i], x[half + i]), i < half,
// by the angle (offset + token) * scale / periods[i], and copies the elements from x[2 * half] on. y has the type of x.
struct Rope {
  Heads x;
  int64_t batch;
  int64_t heads;
  int64_t tokens;
  int64_t width;
  int64_t half;
  const int32_t* offsets; // one number, or one for each sequence of the batch
  bool offset_per_sequence;
  const float* periods; // [half], or null for base^(i / half)
  float base;
  float scale;
  void* y;
};
EXECUTORCH_MLX_KERNEL_API void rope(const Rope& rope);

} // namespace executorch_mlx::kernel
