// Samples a token from logits on the host. The parameters have the same meaning as in the sampling head
// (custom_kernel_ops/sample.py and penalties.py), and a seed gives the same noise.
#pragma once

#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <span>

namespace executorch_mlx {

// One sequence of a batch, and the inputs of its draw.
struct HostDraw {
  std::span<float> logits; // [V]; draw_on_host() changes them
  int64_t sequence = 0; // index in the batch
  int64_t batch = 1; // number of sequences
  int64_t seed = 0;
  std::span<const int64_t> history; // the tokens that the penalties consider
  std::span<const int32_t> allowed_tokens; // one bit per token; empty: all tokens are allowed
};

// Draws a token and returns its id. Applies the logits processors to draw.logits in place. Uses draw.seed and
// draw.allowed_tokens instead of sampling.seed and sampling.allowed_tokens.
int64_t draw_on_host(const HostDraw& draw, const SamplingParameters& sampling);

} // namespace executorch_mlx
