// The operands of SampleNode.
#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// logits is [rows, vocabulary] in float32, float16 or bfloat16. temperature, top_p and min_p are float32, and seed and
// top_k are int64. Each of these five has one element, or one for each row.
struct SampleInputs {
  mx::array logits;
  mx::array temperature;
  mx::array top_p;
  mx::array seed;
  std::optional<mx::array> top_k;
  std::optional<mx::array> min_p;
};

} // namespace executorch_mlx
