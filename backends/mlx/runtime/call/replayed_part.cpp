#include "call/replayed_part.h"

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "call/call_io.h"
#include "mlx_internals/cuda.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

// What a chain does with slots from instruction `begin` on.
struct SlotUse {
  SlotUse(const MlxProgram& program, int64_t chain, size_t begin = 0) {
    const auto& instructions = program.chains[chain].instructions;
    for (size_t i = begin; i < instructions.size(); ++i) {
      const auto& instruction = *instructions[i].source;
      for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
        if (access != Access::write) {
          add_read(tid.idx());
        }
      });
      add_called(program, instruction);
      for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
        if (access != Access::read) {
          written.insert(tid.idx());
        }
      });
    }
  }

  std::set<uint32_t> read; // before the chain writes them
  std::set<uint32_t> written; // in every case

 private:
  void add_read(uint32_t slot) {
    if (!written.contains(slot)) {
      read.insert(slot);
    }
  }

  // Of the chains that a control instruction runs, only the branches of an If certainly write something.
  void add_called(const MlxProgram& program, const fb::Instruction& instruction) {
    std::vector<SlotUse> called;
    for (const int64_t chain : called_chains(instruction)) {
      const auto& use = called.emplace_back(program, chain);
      std::for_each(use.read.begin(), use.read.end(), [&](uint32_t slot) { add_read(slot); });
    }
    if (instruction.op_type() == fb::OpNode::IfNode) {
      const auto &a = called[0].written, &b = called[1].written;
      std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::inserter(written, written.end()));
    }
  }
};

// The tensors in slots, of those that are not empty.
ReplayedPart::Slots contents(const State& state, const std::vector<uint32_t>& slots) {
  ReplayedPart::Slots result;
  for (const uint32_t slot : slots) {
    if (state.tensors[slot]) {
      result.emplace_back(slot, *state.tensors[slot]);
    }
  }
  return result;
}

} // namespace

std::optional<ReplayedPart> ReplayedPart::find(const MlxProgram& program) {
  const auto are_tensors = [](const auto* map) {
    return map != nullptr && map->size() > 0 && std::all_of(map->begin(), map->end(), [](const auto* slot) {
      return slot->slot_type() == fb::SlotType::TensorSlot;
    });
  };
  const auto tokens = input_slot(program, "tokens");
  if (!tokens || !are_tensors(program.graph->input_map()) || !are_tensors(program.graph->output_map())) {
    return std::nullopt;
  }
  auto use = find_position_use(program);
  if (!use) {
    return std::nullopt;
  }
  ReplayedPart part{program, *std::move(use), *tokens, {}, {}, {}};
  const auto& layout = program.layout;
  const auto main = program.graph->main_chain_idx();
  const auto read = SlotUse(program, main, part.use.end).read;
  std::vector<const DecodedInstruction*> writers(layout.num_tensors()); // the last ones
  const std::set<uint32_t> caches(part.use.caches.begin(), part.use.caches.end());
  std::set<uint32_t> buffers;
  for (size_t i = 0; i < part.use.end; ++i) {
    const auto& instruction = program.chains[main].instructions[i];
    for_each_tensor_slot(*instruction.source, [&](const fb::Tid& tid, Access access) {
      writers[tid.idx()] = access == Access::read ? writers[tid.idx()] : &instruction;
      if (layout.is_buffer(tid.idx()) && !caches.contains(tid.idx())) {
        buffers.insert(tid.idx());
      }
    });
  }
  part.buffers.assign(buffers.begin(), buffers.end());
  for (uint32_t slot = 0; slot < layout.num_tensors(); ++slot) {
    const bool is_output = slot >= layout.outputs_begin() && slot < layout.buffers_begin();
    const bool is_input = slot >= layout.inputs_begin() && slot < layout.outputs_begin();
    const bool is_read = read.contains(slot) && slot >= layout.temps_begin();
    const auto* const writer = writers[slot];
    const bool is_number = std::count(part.use.arithmetic.begin(), part.use.arithmetic.end(), writer) > 0;
    if (writer != nullptr && !is_number && (is_output || is_read)) {
      part.results.push_back(slot);
    } else if (is_input || is_read) {
      part.kept.push_back(slot);
    }
  }
  return part;
}

ReplayedPart::Slots ReplayedPart::run(State& state, Context& context) const {
  context.run(program.graph->main_chain_idx(), 0, use.end);
  auto results = contents(state, this->results);
  const auto kept = contents(state, this->kept);
  state.release_temporaries(); // MLX cannot update a buffer in place while one of them holds it
  for (const Slots* slots : {&kept, &std::as_const(results)}) {
    for (const auto& [slot, x] : *slots) {
      state.tensors[slot] = x;
    }
  }
  return results;
}

bool ReplayedPart::set_values(const std::vector<Value>& values, State& state, Context& context) const {
  state.values = values;
  try {
    for (const auto* instruction : use.arithmetic) {
      instruction->function(instruction->node, context);
    }
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

std::span<const int64_t> ReplayedPart::positions(const State& state) const {
  const mx::array& x = *state.tensors[use.input];
  return {x.data<int64_t>(), x.size()};
}

std::vector<const void*> ReplayedPart::addresses(const State& state, const std::vector<uint32_t>& slots) {
  std::vector<const void*> result;
  for (const uint32_t slot : slots) {
    result.push_back(gpu::address_on_gpu(*state.tensors[slot]));
  }
  return result;
}

bool ReplayedPart::finds_caches(State& state, const std::vector<const void*>& addresses) const {
  for (size_t i = 0; i < use.caches.size(); ++i) {
    auto& slot = state.tensors[use.caches[i]];
    const mx::array cache = *std::exchange(slot, std::nullopt);
    const bool fits = gpu::address_on_gpu(cache) == addresses[i] && state.can_update_in_place(use.caches[i], cache);
    slot = cache;
    if (!fits) {
      return false;
    }
  }
  return true;
}

} // namespace executorch_mlx
