// The lazy graphs of MLX.
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <string_view>
#include <vector>

namespace executorch_mlx::internals {

namespace mx = mlx::core;

// Whether x is the result of the MLX primitive of this name, and its computation has not been scheduled.
bool is_lazy(const mx::array& x, std::string_view name);

// The name of the primitive that computes x, which is lazy, its inputs, its device, and its results other than x.
std::string_view primitive_name(const mx::array& x);
const std::vector<mx::array>& inputs(const mx::array& x);
mx::Device device(const mx::array& x);
const std::vector<mx::array>& siblings(const mx::array& x);

// Replaces the inputs of the operation that computes x, which is lazy.
void set_inputs(mx::array x, std::vector<mx::array> inputs);

// The axes of a lazy transposition.
std::vector<int> axes_of_transposition(const mx::array& x);

// Element i of the range is start + i * step.
struct Range {
  int64_t start;
  int64_t step;
};

// If x is a lazy range of int32 or int64, returns it.
std::optional<Range> range_of(const mx::array& x);

} // namespace executorch_mlx::internals
