// The operands of attention and rotary embedding.
#pragma once

#include <cstdint>

#include "float_type.h"

namespace executorch_mlx::kernel {

// An array [batch, heads, tokens, width] of any type but pairs, with any strides.
struct Heads {
  const void* data;
  FloatType type;
  int64_t strides[4];
};

} // namespace executorch_mlx::kernel
