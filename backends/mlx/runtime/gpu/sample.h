// The sampler on GPUs: two kernels, compiled from one source code for CUDA and for Metal.
#pragma once

#include <mlx/mlx.h>

#include <optional>

#include "../sample_inputs.h"

namespace executorch_mlx::gpu {

// Returns the token drawn from each row, int64 [rows], as a lazy array. Returns nullopt if `stream` is not a GPU
// stream, or if the sizes do not fit in 32 bits.
std::optional<mx::array> sample(const SampleInputs& inputs, mx::Stream stream);

// Draws the tokens at once, on this thread, with the same source code compiled as C++. The inputs must be evaluated,
// contiguous and in host memory.
mx::array sample_on_host(const SampleInputs& inputs);

} // namespace executorch_mlx::gpu
