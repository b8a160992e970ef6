// Shared by the MLX primitives in this folder.
#pragma once

#include <mlx/mlx.h>

#include <functional>
#include <optional>
#include <vector>

#include "kernels/float_type.h"

namespace executorch_mlx {

namespace mx = mlx::core;

namespace cpu {

// The work that a stream runs once the inputs have their values.
using Task = std::function<void()>;

// Called during evaluation, when the inputs and `out` have memory: returns the task that fills `out`.
using MakeTask = std::function<Task(const std::vector<mx::array>& inputs, mx::array& out)>;

// A lazy float32 array on a CPU stream. `name` is the name of its MLX primitive.
mx::array lazy_array(
    const char* name, mx::Shape shape, std::vector<mx::array> inputs, mx::Stream stream, MakeTask make_task);

// Whether the kernels accept `x` on `stream`: it is float32, not empty and not a scalar, and `stream` is a CPU stream.
bool is_float32_on_cpu(const mx::array& x, mx::Stream stream);

// The dtype as kernels name it, or nullopt if they do not support it.
std::optional<FloatType> float_type(mx::Dtype dtype);

// `x` in contiguous memory. Returns `x` itself if it is known to be contiguous.
mx::array contiguous(const mx::array& x, mx::Stream stream);

} // namespace cpu

} // namespace executorch_mlx
