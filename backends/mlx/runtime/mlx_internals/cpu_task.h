// Computations of this library on the stream of a CPU.
#pragma once

#include <mlx/mlx.h>

#include <functional>
#include <vector>

namespace executorch_mlx::internals {

namespace mx = mlx::core;

// A computation. It runs when the inputs have been computed.
using Task = std::function<void()>;

// Returns the task that computes the outputs. Called when the inputs and outputs have memory. The elements of the
// inputs may still be missing: they are there when the task runs.
using MakeTasks = std::function<Task(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs)>;

// Lazy arrays that the task from `make_tasks` computes from `inputs`, with an MLX primitive called `name`.
std::vector<mx::array> lazy_results(const char* name, std::vector<mx::Shape> shapes,
    const std::vector<mx::Dtype>& dtypes, const std::vector<mx::array>& inputs, mx::Stream stream,
    MakeTasks make_tasks);

// Runs a task on the thread of a stream of the CPU, before the computations that follow.
void run_on_thread(mx::Stream stream, Task task);

// MLX counts the tasks of kernels that it has started, and waits if they are many. If the error of an earlier kernel
// surfaces while MLX starts a task, MLX never counts this task as completed. After a dozen such errors, the process
// would wait forever. This function completes the count, when nothing runs on `stream`. If another thread evaluates at
// the same time, the count may then be too small, and MLX only starts more tasks before it waits.
void complete_count_of_tasks(mx::Stream stream);

} // namespace executorch_mlx::internals
