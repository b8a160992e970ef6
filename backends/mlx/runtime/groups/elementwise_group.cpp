#include "groups/elementwise_group.h"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "program/program.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

using Step = cpu::ElementwiseSequence::Step;

std::optional<Elementwise> unary_operation(fb::OpNode op) {
  switch (op) {
    case fb::OpNode::SigmoidNode:
      return Elementwise::sigmoid;
    case fb::OpNode::SiluNode:
      return Elementwise::silu;
    case fb::OpNode::TanhNode:
      return Elementwise::tanh;
    default:
      return std::nullopt;
  }
}

std::optional<Elementwise> binary_operation(fb::OpNode op) {
  switch (op) {
    case fb::OpNode::AddNode:
      return Elementwise::add;
    case fb::OpNode::SubtractNode:
      return Elementwise::subtract;
    case fb::OpNode::MultiplyNode:
      return Elementwise::multiply;
    case fb::OpNode::MaximumNode:
      return Elementwise::maximum;
    default:
      return std::nullopt;
  }
}

template <typename Table>
const Table& table_of(const fb::Instruction& instruction) {
  return *static_cast<const Table*>(instruction.op());
}

// Collects the instructions of one group.
class GroupBuilder {
 public:
  explicit GroupBuilder(size_t first) { group_.first = group_.last = first; }

  // Appends the next instruction, or returns false if it cannot be in this group.
  bool add(const fb::Instruction& instruction, uint32_t list_elements) {
    const bool is_added = add_steps(instruction);
    group_.last += is_added ? 1 : 0;
    group_.list_elements += is_added ? list_elements : 0;
    return is_added;
  }

  size_t size() const { return group_.last - group_.first; }

  size_t last() const { return group_.last; }

  // The group. `is_read_later(slot)` says whether anything reads what the group writes to a slot.
  template <typename IsReadLater>
  ElementwiseGroup finish(IsReadLater&& is_read_later) && {
    std::vector<std::pair<const fb::Tid*, uint32_t>> read_later;
    for (const auto& [slot, value] : written_) {
      if (is_read_later(slot)) {
        read_later.emplace_back(value.first, value.second);
        group_.sequence.steps[value.second].is_result = true;
      }
    }
    const auto& steps = group_.sequence.steps;
    for (const auto& [slot, step] : read_later) {
      const auto index = std::count_if(steps.begin(), steps.begin() + step, [](const Step& s) { return s.is_result; });
      group_.results.push_back({slot, static_cast<size_t>(index)});
    }
    return std::move(group_);
  }

 private:
  bool add_steps(const fb::Instruction& instruction) {
    const auto op = instruction.op_type();
    if (const auto operation = unary_operation(op)) {
      const auto& n = table_of<fb::UnaryNode>(instruction);
      return add_step({.operation = *operation, .a = value_of(n.x())}, n.out());
    }
    if (const auto operation = binary_operation(op)) {
      const auto& n = table_of<fb::BinaryNode>(instruction);
      const uint32_t a = value_of(n.a());
      return add_step({.operation = *operation, .a = a, .b = value_of(n.b())}, n.out());
    }
    switch (op) {
      case fb::OpNode::IdCopyNode:
        return add_copy(table_of<fb::UnaryNode>(instruction));
      case fb::OpNode::SliceNode:
        return add_slice(table_of<fb::SliceParams>(instruction));
      case fb::OpNode::SplitNode:
        return add_split(table_of<fb::SplitParams>(instruction));
      default:
        return false;
    }
  }

  bool add_step(Step step, const fb::Tid* out) {
    auto& steps = group_.sequence.steps;
    if (steps.size() == cpu::ElementwiseSequence::kMaxSteps) {
      return false;
    }
    written_[out->idx()] = {out, static_cast<uint32_t>(steps.size())};
    steps.push_back(step);
    return true;
  }

  // A copy of a result of the group adds no step: its slot also names this result. A copy of anything else cannot be in
  // the group.
  bool add_copy(const fb::UnaryNode& n) {
    const auto found = written_.find(n.x()->idx());
    if (found == written_.end()) {
      return false;
    }
    const uint32_t step = found->second.second;
    written_[n.out()->idx()] = {n.out(), step};
    return true;
  }

  bool add_slice(const fb::SliceParams& n) {
    if (n.step() != 1 || n.axis()->is_vid() || n.start()->is_vid() || n.stop()->is_vid()) {
      return false;
    }
    return add_step({.operation = Elementwise::copy,
                        .a = value_of(n.x()),
                        .axis = n.axis()->literal(),
                        .start = n.start()->literal(),
                        .stop = n.stop()->literal()},
        n.out());
  }

  // A split into several parts of one size, of which the last one may be smaller.
  bool add_split(const fb::SplitParams& n) {
    const uint32_t parts = n.outs()->size();
    const bool fits = group_.sequence.steps.size() + parts <= cpu::ElementwiseSequence::kMaxSteps;
    if (!fits || parts < 2 || n.sizes()->size() != 1 || n.sizes()->Get(0)->is_vid()) {
      return false;
    }
    const int64_t size = n.sizes()->Get(0)->literal();
    if (size <= 0 || size > std::numeric_limits<int32_t>::max()) {
      return false;
    }
    const uint32_t x = value_of(n.x());
    for (uint32_t i = 0; i < parts; ++i) {
      add_step({.operation = Elementwise::copy,
                   .a = x,
                   .axis = n.axis(),
                   .start = i * size,
                   .stop = (i + 1) * size,
                   .is_rest = i + 1 == parts},
          n.outs()->Get(i));
    }
    return true;
  }

  // The number of the operand in a slot: a result of the group, or else an input.
  uint32_t value_of(const fb::Tid* slot) {
    if (const auto found = written_.find(slot->idx()); found != written_.end()) {
      return found->second.second;
    }
    auto& inputs = group_.inputs;
    const auto same = [&](const fb::Tid* input) { return input->idx() == slot->idx(); };
    const auto found = std::find_if(inputs.begin(), inputs.end(), same);
    const auto index = static_cast<uint32_t>(found - inputs.begin());
    if (found == inputs.end()) {
      inputs.push_back(slot);
    }
    return static_cast<uint32_t>(cpu::ElementwiseSequence::kMaxSteps) + index;
  }

  ElementwiseGroup group_;
  // The slots that the group has written so far: the field that names the slot, and the step whose result it holds.
  std::map<uint32_t, std::pair<const fb::Tid*, uint32_t>> written_;
};

// Finds the groups, and decides which of their results are read later.
//
// A chain may read a slot before it has written the slot. It then reads what another chain, or an earlier run of the
// same chain, has written. Such a slot is in `shared_`, and so is every output of the program.
//
// A result that a group writes to a temporary outside `shared_` can be read only later in the same chain: it is read
// if the next access of the chain to this slot reads it.
class GroupFinder {
 public:
  explicit GroupFinder(MlxProgram& program)
      : program_(program),
        shared_(program.layout.num_tensors(), false),
        last_write_(program.layout.num_tensors(), 0),
        next_access_(program.layout.num_tensors(), {0, Access::write}) {}

  void run() {
    for (const auto& chain : program_.chains) {
      find_shared(chain.instructions);
    }
    if (const auto* outputs = program_.graph->output_map()) {
      for (const auto* slot : *outputs) {
        if (slot->slot_type() == fb::SlotType::TensorSlot) {
          shared_[slot->idx()] = true;
        }
      }
    }
    for (auto& chain : program_.chains) {
      find_groups(chain);
    }
  }

 private:
  // Marks the slots that a chain reads before it writes them. A write before a control instruction does not count after
  // it, because the chains that the instruction runs may have overwritten the slot.
  void find_shared(const std::vector<DecodedInstruction>& instructions) {
    ++epoch_;
    for (const auto& decoded : instructions) {
      const auto* instruction = decoded.source;
      const bool runs_chains = is_control(*instruction);
      for_each_tensor_slot(*instruction, [&](const fb::Tid& tid, Access access) {
        if (runs_chains || (access != Access::write && last_write_[tid.idx()] != epoch_)) {
          shared_[tid.idx()] = true;
        }
      });
      for_each_tensor_slot(*instruction, [&](const fb::Tid& tid, Access access) {
        if (access != Access::read) {
          last_write_[tid.idx()] = epoch_;
        }
      });
      epoch_ += runs_chains ? 1 : 0;
    }
  }

  void find_groups(Chain& chain) {
    const auto& instructions = chain.instructions;
    std::vector<GroupBuilder> builders;
    for (uint32_t i = 0; i < instructions.size();) {
      GroupBuilder builder(i);
      while (i < instructions.size() && builder.add(*instructions[i].source, instructions[i].list_elements)) {
        ++i;
      }
      const size_t size = builder.size();
      if (size > 1) {
        builders.push_back(std::move(builder));
      }
      i += size == 0 ? 1 : 0;
    }
    if (!builders.empty()) {
      finish_groups(chain, builders);
    }
  }

  // Goes through the chain from its end, so that the next access of each slot is known where a group ends.
  void finish_groups(Chain& chain, std::vector<GroupBuilder>& builders) {
    ++epoch_;
    for (size_t i = chain.instructions.size(); i > 0; --i) {
      if (!builders.empty() && builders.back().last() == i) {
        chain.elementwise_groups.push_back(
            std::move(builders.back()).finish([&](uint32_t slot) { return is_read_later(slot); }));
        builders.pop_back();
        chain.instructions[chain.elementwise_groups.back().first].elementwise_group =
            static_cast<uint32_t>(chain.elementwise_groups.size());
      }
      set_next_access(*chain.instructions[i - 1].source);
    }
  }

  bool is_read_later(uint32_t slot) const {
    const auto& [epoch, access] = next_access_[slot];
    const bool is_temporary = slot >= program_.layout.temps_begin();
    return !is_temporary || shared_[slot] || (epoch == epoch_ && access != Access::write);
  }

  void set_next_access(const fb::Instruction& instruction) {
    for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
      if (access == Access::write) {
        next_access_[tid.idx()] = {epoch_, access};
      }
    });
    for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
      if (access != Access::write) {
        next_access_[tid.idx()] = {epoch_, access};
      }
    });
  }

  MlxProgram& program_;
  std::vector<bool> shared_; // by slot
  // The number of the present pass over instructions. An entry of the next two lists with another number does not
  // count.
  uint64_t epoch_ = 0;
  std::vector<uint64_t> last_write_; // by slot, the epoch of the last write
  std::vector<std::pair<uint64_t, Access>> next_access_; // by slot
};

} // namespace

void find_elementwise_groups(MlxProgram& program) { GroupFinder(program).run(); }

} // namespace executorch_mlx
