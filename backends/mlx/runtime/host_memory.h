// Arrays over memory that the CPU writes.
#pragma once

#include <executorch/runtime/core/freeable_buffer.h>
#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// An array with uninitialized memory, for the caller to fill. Throws Failure if it would pass the memory limit.
mx::array allocate(const mx::Shape& shape, mx::Dtype dtype);

// Zeros. On Linux, the pages of a large array take no memory until they are written.
mx::array allocate_zeros(const mx::Shape& shape, mx::Dtype dtype);

// An array over the memory of `data`, which it then owns: the weights of a mapped file are used in
// place. The memory may be read-only. MLX writes into an input that nobody else holds, so the caller
// must hold the array for as long as it is in use.
// Returns nullopt, and leaves `data` alone, if the memory is not aligned or MLX's allocator is not
// the CPU's.
std::optional<mx::array> borrow(
    executorch::runtime::FreeableBuffer& data, const mx::Shape& shape, mx::Dtype dtype);

} // namespace executorch_mlx
