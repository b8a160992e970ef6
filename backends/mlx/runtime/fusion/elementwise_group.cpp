#include "fusion/elementwise_group.h"

#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "call/context.h"
#include "fusion/patterns.h"

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
    case fb::OpNode::ErfNode:
      return Elementwise::erf;
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
  GroupBuilder(const Dataflow& flow, size_t chain, uint32_t first)
      : flow_(flow), chain_(chain), first_(first), end_(first) {}

  // Appends the next instruction, or returns false if it cannot be in this group.
  bool add(const DecodedInstruction& instruction) {
    if (!add_steps(*instruction.source)) {
      return false;
    }
    list_elements_ += end_ > first_ ? instruction.list_elements : 0;
    ++end_;
    return true;
  }

  uint32_t length() const { return end_ - first_; }

  std::unique_ptr<ElementwiseGroup> finish() && {
    std::vector<ElementwiseGroup::Result> results;
    std::vector<uint32_t> of_results; // their steps
    for (const auto& [slot, written] : written_) {
      if (is_read_later(written)) {
        steps_[written.step].is_result = true;
        results.push_back({written.slot, 0});
        of_results.push_back(written.step);
      }
    }
    for (size_t i = 0; i < results.size(); ++i) {
      results[i].index = std::count_if(
          steps_.begin(), steps_.begin() + of_results[i], [](const Step& step) { return step.is_result; });
    }
    return std::make_unique<ElementwiseGroup>(
        length(), list_elements_, cpu::ElementwiseSequence{std::move(steps_)}, std::move(inputs_), std::move(results));
  }

 private:
  // The last write of the group to a slot.
  struct Written {
    const fb::Tid* slot;
    uint32_t step; // whose result the slot holds
    uint32_t instruction;
  };

  // Whether anything but the group reads what the group leaves in a slot.
  bool is_read_later(const Written& written) const {
    const auto& value = flow_.value(flow_.written(chain_, written.instruction, written.slot));
    return flow_.escapes(value) || (value.reads > 0 && value.last_read >= end_);
  }

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
      case fb::OpNode::GeluNode:
        return add_gelu(table_of<fb::GeluParams>(instruction));
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
    if (steps_.size() == cpu::ElementwiseSequence::kMaxSteps) {
      return false;
    }
    written_[out->idx()] = {out, static_cast<uint32_t>(steps_.size()), end_};
    steps_.push_back(step);
    return true;
  }

  bool add_gelu(const fb::GeluParams& n) {
    const auto form = n.approximate()->string_view();
    if (form != "none" && form != "tanh") {
      return false;
    }
    return add_step(
        {.operation = form == "tanh" ? Elementwise::gelu_tanh : Elementwise::gelu, .a = value_of(n.x())}, n.out());
  }

  // A copy of a result of the group adds no step: its slot also names this result. A copy of anything else cannot be in
  // the group.
  bool add_copy(const fb::UnaryNode& n) {
    const auto found = written_.find(n.x()->idx());
    if (found == written_.end()) {
      return false;
    }
    const uint32_t step = found->second.step;
    written_[n.out()->idx()] = {n.out(), step, end_};
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
    const bool fits = steps_.size() + parts <= cpu::ElementwiseSequence::kMaxSteps;
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
      return found->second.step;
    }
    const auto same = [&](const fb::Tid* input) { return input->idx() == slot->idx(); };
    const auto found = std::find_if(inputs_.begin(), inputs_.end(), same);
    const auto index = static_cast<uint32_t>(found - inputs_.begin());
    if (found == inputs_.end()) {
      inputs_.push_back(slot);
    }
    return static_cast<uint32_t>(cpu::ElementwiseSequence::kMaxSteps) + index;
  }

  const Dataflow& flow_;
  const size_t chain_;
  const uint32_t first_;
  uint32_t end_; // the instruction after the group
  uint32_t list_elements_ = 0;
  std::vector<Step> steps_;
  std::vector<const fb::Tid*> inputs_;
  std::map<uint32_t, Written> written_; // by slot
};

} // namespace

bool ElementwiseGroup::run(Context& c) const {
  std::vector<mx::array> arrays;
  arrays.reserve(inputs.size());
  for (const auto* tid : inputs) {
    const auto& slot = c.slot(tid);
    if (!slot) {
      return false;
    }
    arrays.push_back(*slot);
  }
  const auto computed = cpu::elementwise_sequence(sequence, arrays, c.stream);
  if (!computed) {
    return false;
  }
  c.count_operations(computed->operations, 1);
  for (const auto& [slot, index] : results) {
    c.set(slot, computed->arrays[index]);
  }
  return true;
}

void find_elementwise_groups(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    auto& instructions = program.chains[chain].instructions;
    for (uint32_t i = 0; i < instructions.size();) {
      GroupBuilder builder(flow, chain, i);
      uint32_t end = i;
      while (end < instructions.size() && builder.add(instructions[end])) {
        ++end;
      }
      if (builder.length() > 1) {
        instructions[i].fused = std::move(builder).finish();
      }
      i = std::max(end, i + 1);
    }
  }
}

} // namespace executorch_mlx
