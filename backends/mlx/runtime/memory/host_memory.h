// MLX arrays in memory that the CPU can access: new memory, or memory taken over from ExecuTorch.
#pragma once

#include <executorch/runtime/core/freeable_buffer.h>
#include <mlx/mlx.h>

#include <optional>

namespace executorch_mlx {

namespace mx = mlx::core;

// An array with uninitialized memory, for the caller to fill. Throws Failure if it would exceed the memory limit.
mx::array allocate(const mx::Shape& shape, mx::Dtype dtype);

// An array of zeros. On Linux, the pages of a large array take no physical memory until they are written.
mx::array allocate_zeros(const mx::Shape& shape, mx::Dtype dtype);

// Returns an array that uses the memory of `data` without a copy, for example weights in a mapped file. The array
// takes over the ownership, and `data` is empty afterwards. The memory may be read-only. MLX may write a result into
// the memory of an operand to which there is no other reference. To prevent this, the caller must keep a copy of the
// returned mx::array, which is such a reference, while programs use the array.
//
// Returns nullopt, and does not change `data`, if `data` is empty, its address is not aligned for the dtype, or MLX's
// allocator takes no memory of others, as the one for NVIDIA GPUs. The one for Metal takes whole pages: there, data of
// less than 16 KiB are not taken.
std::optional<mx::array> adopt(executorch::runtime::FreeableBuffer& data, const mx::Shape& shape, mx::Dtype dtype);

} // namespace executorch_mlx
