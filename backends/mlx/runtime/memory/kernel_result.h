// What operations with a kernel for Linux CPUs use.
//
// A function of the namespace `cpu` returns its result, or nullopt if no kernel applies: the stream is not one of a
// Linux CPU, or an operand has an unsupported dtype or shape. The caller then uses MLX's own operation. If all operands
// are available, the kernel runs at once, in the calling thread. Otherwise the result is lazy. MLX takes about 10
// microseconds to build the graph of an operation and to evaluate it, as long as a small kernel runs.
#pragma once

#include <mlx/mlx.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "kernels/cpu/float_type.h"
#include "mlx_internals/cpu_task.h"

namespace executorch_mlx {

namespace mx = mlx::core;

namespace cpu {

using internals::MakeTasks;
using internals::Task;

// Whether the library of the kernels exists on this platform. Where it does not, a function must not call a kernel
// outside `if constexpr (kHasKernels)` and generic lambdas.
inline constexpr bool kHasKernels = EXECUTORCH_MLX_HAS_CPU_KERNELS;

// Whether kernels run on this stream. They run at once if their operands are available.
bool computes_at_once(mx::Stream stream);

// Whether the kernels accept x as an operand: x is float32, float16 or bfloat16, not empty and not a scalar, and
// kernels run on the stream.
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

// Returns the arrays that the task from `make_tasks` computes from `inputs`. If all inputs are available, the task runs
// now, in this thread. Otherwise the arrays are lazy: they have an MLX primitive called `name`, and the task runs on
// the CPU stream. make_tasks(inputs, outputs) is a generic lambda, so that it is compiled only where kernels exist. It
// returns the task, and is called when the inputs and outputs have memory.
template <typename Make>
std::vector<mx::array> kernel_results(const char* name, std::vector<mx::Shape> shapes,
    const std::vector<mx::Dtype>& dtypes, const std::vector<mx::array>& inputs, mx::Stream stream, Make make_tasks) {
  if constexpr (kHasKernels) {
    if (!are_available(inputs)) {
      return internals::lazy_results(name, std::move(shapes), dtypes, inputs, stream, std::move(make_tasks));
    }
    std::vector<mx::array> outputs;
    for (size_t i = 0; i < shapes.size(); ++i) {
      outputs.push_back(allocate_result(shapes[i], dtypes[i]));
    }
    make_tasks(inputs, outputs)();
    return outputs;
  }
  throw std::runtime_error("this platform has no kernels");
}

// The same for one result: make_task(inputs, out) gets the only output.
template <typename Make>
mx::array kernel_result(const char* name, mx::Shape shape, mx::Dtype dtype, const std::vector<mx::array>& inputs,
    mx::Stream stream, Make make_task) {
  return kernel_results(name, {std::move(shape)}, {dtype}, inputs, stream,
      [make_task = std::move(make_task)](
          const auto& inputs, auto& outputs) { return make_task(inputs, outputs[0]); })[0];
}

} // namespace cpu

} // namespace executorch_mlx
