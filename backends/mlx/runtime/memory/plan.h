// Estimates the memory of an evaluation before it runs.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// Divides the evaluation of `arrays` into stages, so that the memory in use never exceeds `limit` bytes, of which
// `active` are in use before the evaluation. Returns the arrays to evaluate in each stage. There is one stage if all
// results fit at the same time. Throws Failure if a result does not fit even after all results that are no longer
// needed are freed.
//
// `overwritable` are the ids of arrays that are already evaluated and that only the graph holds when it runs, so that
// MLX can update them in place.
//
// Counts the results of MLX primitives, except views and updates in place, and the work space of convolutions on a CPU.
// Does not count the work space of other primitives.
std::vector<std::vector<mx::array>> plan_stages(
    std::vector<mx::array> arrays, const std::vector<std::uintptr_t>& overwritable, size_t active, size_t limit);

} // namespace executorch_mlx
