// The elementwise operations of the kernels.
#pragma once

#include <stdint.h>

namespace executorch_mlx {

enum class Elementwise : uint8_t {
  add,
  subtract,
  multiply,
  maximum,
  sigmoid,
  silu,
  tanh,
  gelu,
  gelu_tanh, // its approximation by tanh
  erf,
  copy,
  exp
};

} // namespace executorch_mlx
