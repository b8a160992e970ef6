// Finds where the main chain reads its temporaries for the last time, so that a call frees their memory there.
#include <algorithm>

#include "fusion/patterns.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

// By instruction, the last one that may be computed together with it: where a FusedInstruction ends.
std::vector<uint32_t> ends_of_groups(const Chain& chain) {
  std::vector<uint32_t> ends;
  uint32_t end = 0;
  for (uint32_t i = 0; i < chain.instructions.size(); ++i) {
    const auto& fused = chain.instructions[i].fused;
    end = std::max(end, i + (fused ? fused->length - 1 : 0));
    ends.push_back(end);
  }
  for (uint32_t i = ends.size(); i-- > 0;) { // a group may begin in another one, which then does not run
    ends[i] = ends[ends[i]];
  }
  return ends;
}

} // namespace

void find_last_reads(MlxProgram& program, const Dataflow& flow) {
  const uint32_t main = program.graph->main_chain_idx();
  auto& instructions = program.chains[main].instructions;
  const auto ends = ends_of_groups(program.chains[main]);
  for (uint32_t i = 0; i < instructions.size(); ++i) {
    const auto release = [&](uint32_t number) {
      const SlotValue& value = flow.value(number);
      const uint32_t last = value.reads > 0 ? value.last_read : value.writer;
      auto& released = instructions[ends[i]].released;
      const bool is_new = std::find(released.begin(), released.end(), value.slot) == released.end();
      if (last == i && is_new && !flow.escapes(value) && value.next_writer > ends[i]) {
        released.push_back(value.slot);
      }
    };
    for_each_tensor_slot(*instructions[i].source, [&](const fb::Tid& tid, Access access) {
      if (access != Access::write) {
        release(flow.read(main, i, &tid));
      }
      if (access != Access::read) {
        release(flow.written(main, i, &tid));
      }
    });
  }
}

} // namespace executorch_mlx
