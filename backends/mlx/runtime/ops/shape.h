// Stacking arrays.
#pragma once

#include "call/context.h"

namespace executorch_mlx {

// The shape of `count` arrays like x, stacked along a new axis.
mx::Shape shape_stacked(const mx::array& x, int count, int axis);

// Returns the arrays stacked along a new axis.
mx::array stacked(const std::vector<mx::array>& arrays, int axis, Context& c);

} // namespace executorch_mlx
