// What ExecuTorch's event tracer gets to see: every instruction, as it runs.
//
// MLX puts work off until somebody asks for the result. For the times to mean
// something a traced call asks after each instruction, so that it is slower than
// another: nothing is fused, and no two instructions run at once. The results are
// the same.
#include <executorch/runtime/core/event_tracer.h>
#include <executorch/runtime/platform/platform.h>

#include <cstring>

#include "context.h"
#include "dispatch.h"

namespace executorch_mlx {

namespace {

namespace et = executorch::runtime;

// The tensor slots that an instruction writes.
std::vector<uint32_t> results_of(const fb::Instruction& instruction) {
  std::vector<uint32_t> slots;
  const auto visit = [&](const Field& field) {
    if (field.value == nullptr || !field.is(fb::TidTypeTable) || std::strncmp(field.name, "out", 3) != 0) {
      return;
    }
    if (!field.repeated) {
      slots.push_back(field.structure<fb::Tid>().idx());
      return;
    }
    for (const auto* tid : field.vector<const fb::Tid*>()) {
      slots.push_back(tid->idx());
    }
  };
  for_each_field(
      *static_cast<const flatbuffers::Table*>(instruction.op()), type_of(instruction.op_type()), visit);
  return slots;
}

} // namespace

void Context::run_traced(uint32_t index, size_t i) {
  const Chain& chain = program.chains[index];
  const auto& instruction = *chain.source->instructions()->Get(static_cast<uint32_t>(i));
  // Before it runs: an update in place empties the slot that it read.
  std::string text = describe(instruction);

  const et_timestamp_t start = et::pal_current_ticks();
  chain.steps[i].handler(chain.steps[i].payload, *this);
  const auto slots = results_of(instruction);
  std::vector<mx::array> made;
  for (const uint32_t slot : slots) {
    if (state_.tensors[slot]) {
      made.push_back(*state_.tensors[slot]);
    }
  }
  if (!made.empty()) {
    state_.evaluate(std::move(made), stream);
  }
  const et_timestamp_t end = et::pal_current_ticks();

  text += " ->";
  for (const uint32_t slot : slots) {
    const auto& x = state_.tensors[slot];
    text += str(" %", slot, " ") + (x ? str(executorch_mlx::describe(*x)) : "(empty)");
  }
  // The Inspector takes events of one name in one call for one event.
  std::string name = str(index, ".", i, " ", find_row(size_t(instruction.op_type()))->name);
  if (const uint32_t round = rounds_[&instruction]++; round > 0) {
    name += str(" #", round);
  }
  tracer_->log_profiling_delegate(
      name.c_str(), et::kUnsetDelegateDebugIntId, start, end, text.data(), text.size());
}

} // namespace executorch_mlx
