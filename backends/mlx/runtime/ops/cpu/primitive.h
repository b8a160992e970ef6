// What the files in this folder use to define MLX primitives.
#pragma once

#include <mlx/mlx.h>

#include <functional>
#include <optional>
#include <vector>

#include "kernels/cpu/float_type.h"
#include "mlx_internals/cpu_task.h"

namespace executorch_mlx {

namespace mx = mlx::core;

namespace cpu {

using internals::MakeTasks;
using internals::Task;

// Returns the task that computes `out`. Called when the inputs and `out` have memory. The elements of the inputs may
// still be missing: they are there when the task runs.
using MakeTask = std::function<Task(const std::vector<mx::array>& inputs, mx::array& out)>;

// Returns the array that the task from `make_task` computes from `inputs`. If all inputs are available, the task runs
// now, in this thread. Otherwise the array is lazy: it has an MLX primitive called `name`, and the task runs on the CPU
// stream.
//
// MLX takes about 10 microseconds to build the graph of an operation and to evaluate it, as long as a small kernel
// runs.
mx::array kernel_result(const char* name, mx::Shape shape, mx::Dtype dtype, std::vector<mx::array> inputs,
    mx::Stream stream, MakeTask make_task);

// The same for several results.
std::vector<mx::array> kernel_results(const char* name, std::vector<mx::Shape> shapes,
    const std::vector<mx::Dtype>& dtypes, std::vector<mx::array> inputs, mx::Stream stream, MakeTasks make_tasks);

// Whether the kernels accept x as an operand: x is float32, float16 or bfloat16, not empty and not a scalar, and
// `stream` is a CPU stream.
bool is_supported_operand(const mx::array& x, mx::Stream stream);

// Returns the FloatType of a dtype, or nullopt if the kernels do not support the dtype.
std::optional<FloatType> float_type(mx::Dtype dtype);

// Whether the elements of all arrays can be read now.
bool are_available(const std::vector<mx::array>& arrays);

// Memory for a result that is computed at once: like allocate(), but no other thread can allocate between the check of
// the memory limit and the allocation.
mx::array allocate_result(const mx::Shape& shape, mx::Dtype dtype);

// The distance between consecutive rows of x, the runs of its last axis, or nullopt if the distances differ or the
// elements of a row have gaps. x is available, not empty and not a scalar.
std::optional<int64_t> row_stride(const mx::array& x);

// Returns x in contiguous memory: x itself if it is available and contiguous; if it is available, a copy; otherwise a
// lazy copy.
mx::array contiguous(const mx::array& x, mx::Stream stream);

} // namespace cpu

} // namespace executorch_mlx
