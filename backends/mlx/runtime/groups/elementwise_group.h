// Groups of elementwise instructions, which the runtime computes together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops/cpu/cpu_kernels.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

struct MlxProgram;

// The consecutive instructions [first, last) of a chain. Slots that only these instructions use are neither read nor
// written.
struct ElementwiseGroup {
  struct Result {
    const fb::Tid* slot;
    size_t index; // among the results of the sequence
  };

  size_t first;
  size_t last;
  cpu::ElementwiseSequence sequence;
  std::vector<const fb::Tid*> inputs; // the slots of the inputs of the sequence
  std::vector<Result> results;
  uint32_t list_elements = 0; // the total number of elements in the lists of the instructions
};

// Finds the groups of all chains of a verified program, and writes them to the chains.
void find_elementwise_groups(MlxProgram& program);

} // namespace executorch_mlx
