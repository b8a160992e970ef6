// Samples a token from logits on the host. The parameters have the same meaning as in the sampling head
// (custom_kernel_ops/sample.py and logits_processors.py), and a seed gives the same noise.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "options.h"

namespace executorch_mlx::engine {

// The inputs of a draw.
struct HostDraw {
  std::span<float> logits; // [V]; draw_on_host() changes them
  int64_t seed = 0;
  std::span<const int64_t> history; // the tokens that the penalties consider
  std::span<const int32_t> allowed_tokens; // one bit per token; empty: all tokens are allowed
};

// Draws a token and returns its id. Applies the logits processors to draw.logits in place.
int64_t draw_on_host(const HostDraw& draw, const SamplingParameters& sampling);

// Returns the logarithm of the softmax of `logits` at each of `tokens`. A token whose logit is NaN has a probability of
// 0.
std::vector<float> log_probabilities(std::span<const float> logits, std::span<const int64_t> tokens);

// Returns the ids of the `count` largest logits, in descending order of the logits. Equal logits are ordered by id.
std::vector<int64_t> most_likely(std::span<const float> logits, int64_t count);

} // namespace executorch_mlx::engine
