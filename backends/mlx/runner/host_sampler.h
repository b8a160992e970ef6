// The draw of a token from logits, on the host: the parameters of Sampling with the
// meaning they have inside a program (custom_kernel_ops/sample.py, penalties.py), and
// the same noise from the same seed.
#pragma once

#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <span>

namespace executorch_mlx {

// A row of [batch, V] logits, and what the draw from it depends on.
struct HostDraw {
  std::span<float> logits; // [V]; changed
  int64_t row = 0;
  int64_t batch = 1;
  int64_t seed = 0;
  std::span<const int64_t> history; // tokens that the penalties look at
  std::span<const int32_t> allowed_tokens; // a bit a token; empty: all
};

int64_t draw_on_host(const HostDraw& draw, const Sampling& sampling);

} // namespace executorch_mlx
