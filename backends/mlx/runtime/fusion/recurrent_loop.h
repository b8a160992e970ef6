// Loops over the time steps of recurrent layers, such as LSTM, which the runtime computes in one call of a CPU kernel.
//
// Between the instructions of a time step, the threads would have to wait for each other, and each instruction would
// allocate its results. Together, this takes as long as the arithmetic of a small layer.
#pragma once

#include <cstdint>
#include <vector>

#include "program/program.h"
#include "ops/cpu/cpu_kernels.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

// A ScanNode whose body is an AddmmNode, which multiplies a carry by a constant, and one ElementwiseGroup.
class RecurrentLoop : public FusedInstruction {
 public:
  bool run(Context& c) const override;

  const fb::ScanParams* scan;
  const fb::AddmmParams* product;
  uint32_t packed_matrix; // State::kept[packed_matrix]
  uint32_t body_length; // in instructions
  cpu::RecurrentCell cell;
  std::vector<const fb::Tid*> fixed; // the slots of the operands that are the same in all time steps
  std::vector<const fb::Tid*> last; // the slots of the cell's `last_steps`
};

} // namespace executorch_mlx
