// Views of arrays: arrays that use the memory of another array, if possible without a copy.
//
// These functions take the arguments of MLX's functions of the same names. If x has been evaluated, they return a view
// that is evaluated as well, so that kernels can run on it at once. If a view cannot express the result of reshape(),
// it copies x. Otherwise, they call MLX.
#pragma once

#include <mlx/mlx.h>

#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

namespace views {

mx::array reshape(const mx::array& x, const mx::Shape& shape, mx::Stream stream);
mx::array transpose(const mx::array& x, const std::vector<int>& axes, mx::Stream stream);
mx::array expand_dims(const mx::array& x, int axis, mx::Stream stream);
mx::array squeeze(const mx::array& x, const std::vector<int>& axes, mx::Stream stream);
mx::array take(const mx::array& x, int index, int axis, mx::Stream stream);

// A number `x` for an operation with `other`. If `other` has one element, the number gets its shape, because MLX would
// need an operation to broadcast it.
mx::array scalar_for(const mx::array& other, const mx::array& x, mx::Stream stream);

// All bounds count from the front and lie within x, and all steps are positive.
mx::array slice(
    const mx::array& x, const mx::Shape& start, const mx::Shape& stop, const mx::Shape& steps, mx::Stream stream);

} // namespace views

} // namespace executorch_mlx
