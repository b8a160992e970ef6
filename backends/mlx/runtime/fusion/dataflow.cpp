#include "fusion/dataflow.h"

#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

// By chain, whether it can run. Replacements leave chains that nothing calls.
std::vector<bool> chains_that_run(const MlxProgram& program) {
  std::vector<bool> runs(program.chains.size(), false);
  std::vector<int64_t> added{program.graph->main_chain_idx(), program.init_chain};
  while (!added.empty()) {
    const int64_t chain = added.back();
    added.pop_back();
    if (chain < 0 || runs[chain]) {
      continue;
    }
    runs[chain] = true;
    for (const auto& instruction : program.chains[chain].instructions) {
      const auto called = called_chains(*instruction.source);
      added.insert(added.end(), called.begin(), called.end());
    }
  }
  return runs;
}

} // namespace

Dataflow::Dataflow(const MlxProgram& program)
    : layout_(program.layout),
      shared_(program.layout.num_tensors(), false),
      present_(program.layout.num_tensors(), {0, 0}) {
  if (const auto* outputs = program.graph->output_map()) {
    for (const auto* slot : *outputs) {
      if (slot->slot_type() == fb::SlotType::TensorSlot) {
        shared_[slot->idx()] = true;
      }
    }
  }
  const auto runs = chains_that_run(program);
  for (size_t i = 0; i < runs.size(); ++i) {
    add_chain(program.chains[i], runs[i]);
  }
}

void Dataflow::add_chain(const Chain& chain, bool runs) {
  ++epoch_;
  auto& begins = begins_.emplace_back();
  begins.reserve(chain.instructions.size() + 1);
  for (uint32_t i = 0; i < chain.instructions.size(); ++i) {
    begins.push_back(entries_.size());
    const auto& instruction = *chain.instructions[i].source;
    const bool runs_chains = is_control(instruction);
    for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
      const uint32_t slot = tid.idx();
      shared_[slot] = shared_[slot] || (runs && runs_chains);
      if (access == Access::write) {
        return;
      }
      auto& [epoch, number] = present_[slot];
      if (epoch != epoch_) {
        shared_[slot] = shared_[slot] || runs;
        epoch = epoch_;
        number = static_cast<uint32_t>(values_.size());
        values_.push_back({slot, SlotValue::kNoWriter});
      }
      ++values_[number].reads;
      values_[number].last_read = i;
      entries_.push_back({slot, number, /*is_write=*/false});
    });
    for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
      if (access != Access::read) {
        const auto number = static_cast<uint32_t>(values_.size());
        if (present_[tid.idx()].first == epoch_ && !runs_chains) {
          values_[present_[tid.idx()].second].next_writer = i;
        }
        present_[tid.idx()] = {epoch_, number};
        values_.push_back({tid.idx(), i});
        entries_.push_back({tid.idx(), number, /*is_write=*/true});
      }
    });
    epoch_ += runs_chains ? 1 : 0;
  }
  begins.push_back(entries_.size());
}

uint32_t Dataflow::find(size_t chain, size_t instruction, const fb::Tid* slot, bool is_write) const {
  size_t i = begins_[chain][instruction];
  while (entries_[i].slot != slot->idx() || entries_[i].is_write != is_write) {
    ++i;
  }
  return entries_[i].value;
}

} // namespace executorch_mlx
