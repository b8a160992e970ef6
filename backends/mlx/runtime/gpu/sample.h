// The sampler on GPUs: two kernels of ours, from one source for CUDA and Metal.
#pragma once

#include <mlx/mlx.h>

#include <optional>

#include "../sample_inputs.h"

namespace executorch_mlx::gpu {

// Draws a token from each row: int64 [rows], lazy. Returns nullopt if `stream` is not a GPU stream,
// or if the sizes do not fit in 32 bits.
std::optional<mx::array> sample(const SampleInputs& inputs, mx::Stream stream);

// Draws the tokens with the same kernels, compiled as C++, on this thread. The inputs are evaluated and contiguous, and in host memory.
mx::array sample_on_host(const SampleInputs& inputs);

} // namespace executorch_mlx::gpu
