#pragma once

#include <executorch/runtime/core/freeable_buffer.h>
#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// An array over the memory of `data`, which it keeps: the weights of a mapped file are used where
// they are. The memory may be read-only, so somebody has to hold the array for as long as it is in
// use: MLX writes into inputs that nobody else holds. Nothing, and `data` untouched, where that is
// not possible: memory that is not aligned, or an allocator that is not the CPU's.
std::optional<mx::array> borrow(
    executorch::runtime::FreeableBuffer& data, const mx::Shape& shape, mx::Dtype dtype);

// Fills memory of an allocator with zeros; on Linux the pages of a large piece are given back, and
// take no memory before they are written.
void clear(void* memory, size_t bytes);

} // namespace executorch_mlx
