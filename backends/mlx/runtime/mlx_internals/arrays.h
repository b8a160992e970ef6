// The memory of MLX arrays.
#pragma once

#include <mlx/mlx.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace executorch_mlx::internals {

namespace mx = mlx::core;

// Strides of an array whose elements lie in memory without gaps, with the last axis innermost.
mx::Strides row_major_strides(const mx::Shape& shape);

// Returns a view of x that begins `offset` elements after the first element of x. x is available, and neither x nor the
// view is empty.
mx::array view(const mx::array& x, mx::Shape shape, mx::Strides strides, int64_t offset);

// An available array with uninitialized memory. Throws std::bad_alloc if there is none.
mx::array new_array(const mx::Shape& shape, mx::Dtype dtype);

// An available array without memory, for take_over() or as an operand that only has a shape.
mx::array without_memory(mx::Shape shape, mx::Dtype dtype);

// Whether MLX allocates with its CPU allocator. Builds for a GPU do not.
bool uses_cpu_allocator();

// An array in the memory at `address`, which is aligned for the dtype. The array keeps `owner`, which owns the memory.
// The memory may be read-only. Only for MLX's CPU allocator.
mx::array array_in(const void* address, const mx::Shape& shape, mx::Dtype dtype, std::shared_ptr<void> owner);

// Like array_in(), for an allocator that takes whole pages of memory without a copy, as MLX's for Metal does: the
// buffer spans the pages that the array touches. Returns nullopt if the allocator takes no memory, or not this one.
std::optional<mx::array> array_in_pages(
    const void* address, const mx::Shape& shape, mx::Dtype dtype, std::shared_ptr<void> owner);

// A new array of bytes in the memory of `piece`. release(piece) is called when nothing uses the new array any more.
mx::array lend(mx::array piece, std::function<void(mx::array)> release);

// An available array in the memory of x, which has room for it.
mx::array array_in(const mx::array& x, const mx::Shape& shape, mx::Dtype dtype);

// An address that identifies the memory of x, or null if x has none.
const void* memory_of(const mx::array& x);

// Whether no other array uses the memory of x.
bool is_sole_user(const mx::array& x);

// While a kernel runs, and for a moment after it, MLX holds references to the memory of its arrays. take_over() moves
// the memory of x to a new array without such references. The caller keeps the order of the kernels. can_take_over() is
// whether x has memory of its own with references.
bool can_take_over(const mx::array& x);
mx::array take_over(const mx::array& x);

// Makes x wait for the kernels that compute `other`, as `other` does.
void wait_as(mx::array& x, const mx::array& other);

// Makes arrays wait for the work of a stream until now, as if MLX had computed them there.
void wait_for_stream(std::vector<mx::array>& arrays, mx::Stream stream);

// In the evaluation of a primitive: places the result y in the memory of x, `offset` elements after its beginning, or
// at the elements of x with the same strides.
void place(mx::array& y, const mx::array& x, int64_t offset);
void place(mx::array& y, const mx::array& x);

} // namespace executorch_mlx::internals
