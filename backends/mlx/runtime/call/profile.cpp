#include "call/profile.h"

#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/platform/platform.h>

#include "call/context.h"
#include "program/dispatch_table.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

namespace et = executorch::runtime;

// The tensor slots that an instruction writes, without those that it both reads and writes.
std::vector<uint32_t> results_of(const fb::Instruction& instruction) {
  std::vector<uint32_t> slots;
  for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
    if (access == Access::write) {
      slots.push_back(tid.idx());
    }
  });
  return slots;
}

} // namespace

void Profiler::run(Context& context, uint32_t chain_index, size_t instruction_index) {
  const Chain& chain = program_.chains[chain_index];
  const DecodedInstruction& decoded = chain.instructions[instruction_index];
  const auto& instruction = *decoded.source;
  // The operands are described before the instruction runs, because an update in place empties the slot of its operand.
  std::string description = context.describe_operands(instruction);

  const et_timestamp_t start = et::pal_current_ticks();
  decoded.function(decoded.node, context);
  const auto slots = results_of(instruction);
  std::vector<mx::array> results;
  for (const uint32_t slot : slots) {
    if (state_.tensors[slot]) {
      results.push_back(*state_.tensors[slot]);
    }
  }
  if (!results.empty()) {
    state_.evaluate(std::move(results), context.stream);
  }
  const et_timestamp_t end = et::pal_current_ticks();

  description += " ->";
  for (const uint32_t slot : slots) {
    const auto& x = state_.tensors[slot];
    description += str(" %", slot, " ") + (x ? str(describe(*x)) : "(empty)");
  }
  // ExecuTorch's Inspector merges the events of one call that have the same name. So if an instruction runs again,
  // as in a loop, a number is added to its name.
  std::string name = str(chain_index, ".", decoded.index, " ", find_row(size_t(instruction.op_type()))->name);
  if (const uint32_t run = runs_[&instruction]++; run > 0) {
    name += str(" #", run);
  }
  tracer_.log_profiling_delegate(
      name.c_str(), et::kUnsetDelegateDebugIntId, start, end, description.data(), description.size());
}

} // namespace executorch_mlx
