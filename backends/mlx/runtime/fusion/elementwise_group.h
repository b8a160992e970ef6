// Elementwise instructions that follow each other, which a CPU kernel computes in one call.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "ops/cpu/cpu_kernels.h"
#include "program/program.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

// Slots that only the instructions of the group use are neither read nor written.
class ElementwiseGroup : public FusedInstruction {
 public:
  struct Result {
    const fb::Tid* slot;
    size_t index; // among the results of the sequence
  };

  ElementwiseGroup(uint32_t length, uint32_t list_elements, cpu::ElementwiseSequence sequence,
      std::vector<const fb::Tid*> inputs, std::vector<Result> results)
      : FusedInstruction(length, list_elements),
        sequence(std::move(sequence)),
        inputs(std::move(inputs)),
        results(std::move(results)) {}

  bool run(Context& c) const override;

  const cpu::ElementwiseSequence sequence;
  const std::vector<const fb::Tid*> inputs; // the slots of the inputs of the sequence
  const std::vector<Result> results;
};

} // namespace executorch_mlx
