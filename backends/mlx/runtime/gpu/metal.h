// What kernels need of MLX's backend for Metal.
#pragma once

#include <mlx/mlx.h>

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// Whether the stream is one of an Apple GPU.
bool is_metal(mx::Stream stream);

} // namespace executorch_mlx::gpu
