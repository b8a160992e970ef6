// The sampler.
#pragma once

#include <cstdint>

#include "api.h"
#include "float_type.h"

namespace executorch_mlx::kernel {

// A parameter of the sampler: one value, or one for each row.
struct Floats {
  const float* data;
  bool per_row;
};
struct Integers {
  const int64_t* data;
  bool per_row;
};

// Draws a token from each row of logits [rows, vocabulary], contiguous, as custom_kernel_ops/sample.py defines. The
// data of top_k and min_p may be null.
struct Sample {
  const void* logits;
  FloatType type; // of logits
  int64_t rows;
  int64_t vocabulary;
  Floats temperature;
  Floats top_p;
  Integers seed;
  Integers top_k;
  Floats min_p;
  int64_t* tokens; // [rows]
};
EXECUTORCH_MLX_KERNEL_API void sample(const Sample& sample);

} // namespace executorch_mlx::kernel
