// Keys of draws without a seed.
#pragma once

#include <mlx/mlx.h>

namespace executorch_mlx {

namespace mx = mlx::core;

// Returns a key of MLX's random functions that no other draw of this process gets. MLX's own key sequence is one for
// each thread, and starts with the same key in all threads.
mx::array next_random_key();

} // namespace executorch_mlx
