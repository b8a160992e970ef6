// The patterns of the pass: see fuse.h. Each function looks for its pattern in all chains.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "fusion/dataflow.h"
#include "program/program.h"

namespace executorch_mlx {

using Pattern = void (*)(MlxProgram& program, const Dataflow& flow);

// Lets an instruction leave its operands for a later one: see HeldOperands. Returns the number of the first operand.
uint32_t hold_operands(MlxProgram& program, DecodedInstruction& instruction, std::vector<const fb::Tid*> slots,
    int64_t max_rows = std::numeric_limits<int64_t>::max());

// Calls use(chain, index, n, a, b) with the AddNodes n of all chains and their operands, and then with the operands in
// the other order, unless use() returns true.
template <typename Use>
void for_each_sum(const MlxProgram& program, Use&& use) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    const auto& instructions = program.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      if (const auto* n = instructions[i].source->op_as_AddNode()) {
        use(chain, i, *n, n->b(), n->a()) || use(chain, i, *n, n->a(), n->b());
      }
    }
  }
}

// For a CPU: elementwise_group.h and recurrent_loop.h, which looks at the elementwise groups.
void find_elementwise_groups(MlxProgram& program, const Dataflow& flow);
void find_recurrent_loops(MlxProgram& program, const Dataflow& flow);
// product_epilogue.h and masked_attention.h. The first one leaves the elementwise groups as they are.
void find_product_epilogues(MlxProgram& program, const Dataflow& flow);
void find_masked_attentions(MlxProgram& program, const Dataflow& flow);
// Transposed constants.
void find_constant_results(MlxProgram& program, const Dataflow& flow);

// For a CPU and an NVIDIA GPU: DecodedInstruction::matrix and MlxProgram::only_in_products; and then product_group.h.
void find_constant_matrices(MlxProgram& program, const Dataflow& flow);
void find_product_groups(MlxProgram& program, const Dataflow& flow);

// For all devices, after the others: DecodedInstruction::released.
void find_last_reads(MlxProgram& program, const Dataflow& flow);

// For an NVIDIA GPU: see the headers of these names. The first two leave the other products to the product groups.
void find_products_and_sums(MlxProgram& program, const Dataflow& flow);
void find_silu_products(MlxProgram& program, const Dataflow& flow);
void find_sums_and_norms(MlxProgram& program, const Dataflow& flow);
void find_ropes(MlxProgram& program, const Dataflow& flow);
void find_quantized_embeddings(MlxProgram& program, const Dataflow& flow);
void find_added_products(MlxProgram& program, const Dataflow& flow);

} // namespace executorch_mlx
