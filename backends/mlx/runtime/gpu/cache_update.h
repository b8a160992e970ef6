// Updates of a KV cache that a kernel of attention can take over.
#pragma once

#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx::gpu {

namespace mx = mlx::core;

// slice_update(cache, update, start, stop) if this writes all heads of one position of a cache [B, heads, capacity, D].
// Nothing else may refer to the cache or its memory until the result is evaluated: the kernel that attends to the result
// may write to this memory itself. Returns nullopt if the update is another one, or the stream is not on an NVIDIA GPU.
std::optional<mx::array> update_position(
    const mx::array& cache, const mx::array& update, const mx::Shape& start, const mx::Shape& stop, mx::Stream stream);

} // namespace executorch_mlx::gpu
