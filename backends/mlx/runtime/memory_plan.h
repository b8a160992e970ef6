// Estimates the memory of an evaluation before it runs.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// Divides the evaluation of `arrays` into stages, so that `active` bytes and those of the evaluation never exceed
// `limit`. There is one stage if everything fits at the same time. Throws Failure if a single result does not fit
// beside those that are still needed.
//
// `overwritable` are the ids of evaluated arrays that nobody but the graph holds when it runs.
//
// Counts the results of MLX primitives, except views and updates in place, and the work space of convolutions on a CPU.
// Does not count the work space of other primitives.
std::vector<std::vector<mx::array>> plan_stages(
    std::vector<mx::array> arrays,
    const std::vector<std::uintptr_t>& overwritable,
    size_t active,
    size_t limit);

} // namespace executorch_mlx
