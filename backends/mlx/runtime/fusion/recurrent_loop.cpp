#include "fusion/recurrent_loop.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "call/context.h"
#include "fusion/elementwise_group.h"
#include "fusion/patterns.h"
#include "memory/views.h"
#include "ops/control.h"

namespace executorch_mlx {

namespace {

using Operand = cpu::RecurrentCell::Operand;
using Source = cpu::RecurrentCell::Source;
using Slots = flatbuffers::Vector<const fb::Tid*>;

std::optional<uint32_t> position(const Slots& slots, const fb::Tid* slot) {
  const auto found = std::find_if(slots.begin(), slots.end(), [&](const auto* s) { return s->idx() == slot->idx(); });
  return found == slots.end() ? std::nullopt : std::optional(static_cast<uint32_t>(found - slots.begin()));
}

// Reads a ScanNode and its body.
class Reader {
 public:
  Reader(const MlxProgram& program, const fb::ScanParams& n)
      : layout_(program.layout), n_(n), body_(program.chains[n.body_chain_idx()]) {}

  // Returns null if it is no recurrent loop.
  std::unique_ptr<RecurrentLoop> read() {
    const auto& instructions = body_.instructions;
    const auto* product = instructions.empty() ? nullptr : instructions[0].source->op_as_AddmmNode();
    const auto* group =
        instructions.size() < 2 ? nullptr : dynamic_cast<const ElementwiseGroup*>(instructions[1].fused.get());
    if (product == nullptr || group == nullptr || group->length + 1 != instructions.size()) {
      return nullptr;
    }
    result_->scan = &n_;
    result_->product = product;
    result_->body_length = static_cast<uint32_t>(instructions.size());
    result_->cell.sequence = &group->sequence;
    const bool is_cell = has_distinct_slots() && read_product() && read_inputs(*group) && read_results(*group);
    return is_cell ? std::move(result_) : nullptr;
  }

 private:
  // Whether no two of the slots that the loop writes are the same.
  bool has_distinct_slots() const {
    std::set<uint32_t> slots{result_->product->out()->idx()};
    for (const auto* list : {n_.sliced(), n_.outputs(), n_.carry()}) {
      for (const auto* slot : *list) {
        if (!slots.insert(slot->idx()).second) {
          return false;
        }
      }
    }
    return true;
  }

  bool read_product() {
    const auto& p = *result_->product;
    const auto hidden = position(*n_.carry(), p.mat1());
    const bool is_plain = p.alpha() == 1 && (p.bias() == nullptr || p.beta() == 1);
    if (!hidden || !is_plain || p.mat2()->idx() >= layout_.constants) {
      return false;
    }
    result_->cell.hidden = *hidden;
    if (p.bias() != nullptr) {
      const auto bias = operand(p.bias());
      if (!bias || bias->source == Source::carry || bias->source == Source::product) {
        return false;
      }
      result_->cell.addend = bias;
    }
    return true;
  }

  bool read_inputs(const ElementwiseGroup& group) {
    for (const auto* slot : group.inputs) {
      const auto input = operand(slot);
      if (!input) {
        return false;
      }
      result_->cell.inputs.push_back(*input);
    }
    return true;
  }

  // Finds where the value of a slot comes from. It cannot be an output, which the body has not written yet.
  std::optional<Operand> operand(const fb::Tid* slot) {
    if (slot->idx() == result_->product->out()->idx()) {
      return Operand{Source::product, 0};
    }
    if (const auto i = position(*n_.carry(), slot)) {
      return Operand{Source::carry, *i};
    }
    if (const auto i = position(*n_.sliced(), slot)) {
      return Operand{Source::sliced, *i};
    }
    if (position(*n_.outputs(), slot)) {
      return std::nullopt;
    }
    result_->fixed.push_back(slot);
    return Operand{Source::fixed, static_cast<uint32_t>(result_->fixed.size() - 1)};
  }

  // Sorts the results of the group. All carries and outputs must be among them.
  bool read_results(const ElementwiseGroup& group) {
    const auto& steps = group.sequence.steps;
    std::vector<uint32_t> result_steps;
    for (uint32_t i = 0; i < steps.size(); ++i) {
      if (steps[i].is_result) {
        result_steps.push_back(i);
      }
    }
    auto& cell = result_->cell;
    cell.carry_steps.resize(n_.carry()->size());
    cell.output_steps.resize(n_.outputs()->size());
    for (const auto& [slot, index] : group.results) {
      const uint32_t step = result_steps[index];
      if (const auto i = position(*n_.carry(), slot)) {
        cell.carry_steps[*i] = step;
      } else if (const auto j = position(*n_.outputs(), slot)) {
        cell.output_steps[*j] = step;
      } else if (is_read(slot)) {
        return false;
      } else {
        cell.last_steps.push_back(step);
        result_->last.push_back(slot);
      }
    }
    return group.results.size() == cell.carry_steps.size() + cell.output_steps.size() + cell.last_steps.size();
  }

  // Whether a time step reads a slot that is no carry. If it also writes the slot, the next time step would read that.
  bool is_read(const fb::Tid* slot) const {
    const auto& fixed = result_->fixed;
    return position(*n_.sliced(), slot) || slot->idx() == result_->product->out()->idx() ||
        std::any_of(fixed.begin(), fixed.end(), [&](const auto* s) { return s->idx() == slot->idx(); });
  }

  const Layout& layout_;
  const fb::ScanParams& n_;
  const Chain& body_;
  std::unique_ptr<RecurrentLoop> result_ = std::make_unique<RecurrentLoop>();
};

// The elements that one time step reads and writes, and the products that it sums up; see max_operations.
uint64_t operations_per_step(const cpu::RecurrentCell& cell, const mx::array& matrix, uint64_t rows) {
  const uint64_t units = matrix.shape(0);
  const uint64_t columns = matrix.shape(1);
  return matrix.size() + rows * (units + columns * (2 + units + 3 * cell.sequence->steps.size()));
}

} // namespace

bool RecurrentLoop::run(Context& c) const {
  const auto& n = *scan;
  const auto [originals, axis, steps] = scan_operands(n, c);
  if (steps == 0) {
    return false;
  }
  const auto& matrix = c.in(product->mat2());
  const auto carries = c.list(*n.carry());
  const auto& hidden = carries[cell.hidden];
  if (!cpu::can_pack_recurrent(matrix, c.stream) || hidden.ndim() != 2 || hidden.shape(1) != matrix.shape(0)) {
    return false;
  }
  check_size({steps, hidden.shape(0), hidden.shape(1)}, mx::float32);
  cpu::RecurrentLoopOperands operands{originals, axis, carries, {}};
  for (const auto* slot : fixed) {
    operands.fixed.push_back(c.in(slot));
  }
  const int64_t instructions = int64_t{body_length} + 1; // a run of a chain counts, too: see Context::run()
  const uint64_t operations = operations_per_step(cell, matrix, hidden.shape(0));
  if (!c.allows_iterations(steps, instructions, operations)) {
    return false; // the instructions run one by one, until one fails
  }
  const auto packed = c.constant_result(packed_matrix, [&] { return *cpu::pack_recurrent(matrix); });
  auto results = cpu::recurrent_loop(cell, operands, packed);
  if (!results) {
    return false;
  }
  c.count_iterations(steps, instructions, operations);
  for (uint32_t i = 0; i < n.carry()->size(); ++i) {
    c.set(n.carry()->Get(i), std::move(results->carries[i]));
  }
  for (uint32_t i = 0; i < n.outputs()->size(); ++i) {
    c.set(n.outputs()->Get(i), std::move(results->outputs[i]));
  }
  // What else the last time step leaves in slots.
  c.set(product->out(), std::move(results->product));
  for (uint32_t i = 0; i < last.size(); ++i) {
    c.set(last[i], std::move(results->last[i]));
  }
  for (uint32_t i = 0; i < n.sliced()->size(); ++i) {
    c.set(n.sliced()->Get(i), views::take(originals[i], steps - 1, axis, c.stream));
  }
  return true;
}

void find_recurrent_loops(MlxProgram& program, const Dataflow&) {
  for (auto& chain : program.chains) {
    for (auto& instruction : chain.instructions) {
      if (const auto* n = instruction.source->op_as_ScanNode()) {
        if (auto loop = Reader(program, *n).read()) {
          loop->packed_matrix = program.layout.add_kept();
          instruction.fused = std::move(loop);
        }
      }
    }
  }
}

} // namespace executorch_mlx
