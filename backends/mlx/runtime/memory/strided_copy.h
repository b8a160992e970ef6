// Copies between arrays with strides.
#pragma once

#include <mlx/mlx.h>

namespace executorch_mlx {

namespace mx = mlx::core;

// Copies elements of `width` bytes. Strides count elements. The two arrays do not overlap in memory.
void strided_copy(
    const mx::Shape& shape, size_t width, const char* from, const mx::Strides& from_strides, char* to,
    const mx::Strides& to_strides);

// Prepares an array for a read that a write follows: maps its pages. Otherwise the read would map the page of zeros if
// the memory is new, and the write would cost a second page fault. Does not change the elements.
void prepare_for_update(const mx::Shape& shape, size_t width, char* data, const mx::Strides& strides);

// The same for `count` bytes.
void prepare_for_update(char* data, size_t count);

// Whether all bytes of the elements are 0.
bool is_zero(const mx::Shape& shape, size_t width, char* data, const mx::Strides& strides);

// Sets all bytes of the elements to 0.
void fill_with_zeros(const mx::Shape& shape, size_t width, char* data, const mx::Strides& strides);

// Strides of an array whose elements lie in memory without gaps, with the last axis innermost.
mx::Strides row_major_strides(const mx::Shape& shape);

} // namespace executorch_mlx
