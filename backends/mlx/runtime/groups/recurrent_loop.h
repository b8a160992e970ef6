// Loops over the time steps of recurrent layers, such as LSTM, which the runtime computes in one call of a CPU kernel.
//
// Between the instructions of a time step, the threads would have to wait for each other, and each instruction would
// allocate its results. Together, this takes as long as the arithmetic of a small layer.
#pragma once

#include <cstdint>
#include <vector>

#include <mlx/mlx.h>

#include "ops/cpu/cpu_kernels.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace mx = mlx::core;
namespace fb = mlx_delegate;

class Context;
struct MlxProgram;

// A ScanNode whose body is an AddmmNode, which multiplies a carry by a constant, and one ElementwiseGroup.
struct RecurrentLoop {
  const fb::AddmmParams* product;
  uint32_t elementwise_group; // its index in the body chain
  cpu::RecurrentCell cell;
  std::vector<const fb::Tid*> fixed; // the slots of the operands that are the same in all time steps
  std::vector<const fb::Tid*> last; // the slots of the cell's `last_steps`
};

// Finds the recurrent loops of a verified program, after its elementwise groups, and writes them to it.
void find_recurrent_loops(MlxProgram& program);

// Runs a ScanNode over the axis `axis` of `originals`, which have the same size there. Returns false, and does nothing,
// if the node is no such loop or the kernel does not support its operands.
bool run_recurrent_loop(const fb::ScanParams& n, const std::vector<mx::array>& originals, int axis, Context& c);

} // namespace executorch_mlx
