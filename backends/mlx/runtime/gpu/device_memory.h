// Memory on an NVIDIA GPU for the results of kernels that MLX does not run. Only operations of MLX can allocate such
// memory, so their results provide it.
#pragma once

#include <mlx/mlx.h>

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// Returns an array of bytes without defined contents. Its memory is used again when no array refers to it any more: so
// a kernel that still runs must refer to it. May evaluate an array on the stream. Called in an evaluation.
mx::array allocate_on_gpu(size_t bytes, mx::Stream stream);

} // namespace executorch_mlx::gpu
