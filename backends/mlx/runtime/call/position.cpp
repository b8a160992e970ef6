#include "call/position.h"

#include <algorithm>
#include <set>

#include "call/call_io.h"
#include "program/reflect.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

// Whether the functions of these ops build a graph without a look at the elements of their operands.
bool reads_no_elements(fb::OpNode op) {
  using fb::OpNode;
  static constexpr OpNode kOps[] = {OpNode::AddmmNode, OpNode::AddNode, OpNode::AsTypeNode, OpNode::ContiguousNode,
      OpNode::DequantizeNode, OpNode::ExpandDimsNode, OpNode::MultiplyNode, OpNode::QuantizedMatmulNode,
      OpNode::ReshapeNode, OpNode::RMSNormNode, OpNode::SampleNode, OpNode::SiluNode, OpNode::SqueezeNode,
      OpNode::TakeNode, OpNode::TransposeNode};
  return std::find(std::begin(kOps), std::end(kOps), op) != std::end(kOps);
}

bool is_arithmetic(fb::OpNode op) {
  using fb::OpNode;
  return op == OpNode::AddIntNode || op == OpNode::SubtractIntNode || op == OpNode::MultiplyIntNode ||
      op == OpNode::FloorDivideIntNode || op == OpNode::ModIntNode;
}

// Calls visit(vid, is_output) with the value slots in the fields of an instruction.
template <typename Visit>
void for_each_value_slot(const fb::Instruction& instruction, Visit&& visit) {
  const auto visit_field = [&](const Field& field) {
    const auto each = [&]<typename T>(const T*, auto&& use) {
      if (!field.repeated) {
        return use(field.table<T>());
      }
      for (const auto* x : field.vector<flatbuffers::Offset<T>>()) {
        use(*x);
      }
    };
    const auto use_number = [&](const auto& x) {
      if (x.is_vid()) {
        visit(x.vid()->idx(), false);
      }
    };
    if (field.value == nullptr) {
      return;
    }
    if (field.is(fb::VidTypeTable)) {
      visit(field.structure<fb::Vid>().idx(), is_output_field(field.name));
    } else if (field.is(fb::IntOrVidTypeTable)) {
      each(static_cast<const fb::IntOrVid*>(nullptr), use_number);
    } else if (field.is(fb::FloatOrVidTypeTable)) {
      each(static_cast<const fb::FloatOrVid*>(nullptr), use_number);
    } else if (field.is(fb::VidOrTidTypeTable)) {
      each(static_cast<const fb::VidOrTid*>(nullptr), use_number);
    } else if (field.is(fb::IntOrVidOrTidTypeTable)) {
      each(static_cast<const fb::IntOrVidOrTid*>(nullptr), [&](const auto& x) {
        if (x.kind() == 1) {
          visit(x.vid()->idx(), false);
        }
      });
    }
  };
  for_each_field(
      *static_cast<const flatbuffers::Table*>(instruction.op()), type_of(instruction.op_type()), visit_field);
}

// Follows the position through the main chain.
class Follower {
 public:
  explicit Follower(const MlxProgram& program) : program_(program), slots_(program.layout.num_tensors()) {}

  std::optional<PositionUse> follow() {
    const auto input = input_slot(program_, "input_pos");
    if (!input) {
      return std::nullopt;
    }
    use_.input = *input;
    slots_[*input] = Slot::position;
    for (const auto& instruction : program_.chains[program_.graph->main_chain_idx()].instructions) {
      if (!visit(instruction)) {
        return std::nullopt;
      }
    }
    return use_.starts.empty() || use_.stops.empty() ? std::nullopt : std::optional(std::move(use_));
  }

 private:
  // What a tensor slot holds.
  enum class Slot {
    other,
    position, // the input, or the same number in another shape or dtype
    updated, // a KV cache with the new token
    span // the positions of an updated KV cache from the first one to the present one
  };

  // Each of these returns whether the program still has the form.
  bool visit(const DecodedInstruction& decoded) {
    const auto& instruction = *decoded.source;
    const auto op = instruction.op_type();
    if (const auto* n = instruction.op_as_ItemIntNode()) {
      values_.insert(n->out()->idx());
      use_.arithmetic.push_back(&decoded);
      return n->x()->idx() == use_.input;
    }
    if (is_arithmetic(op)) {
      return visit_arithmetic(decoded);
    }
    if (const auto* n = instruction.op_as_SymSizeNode()) {
      values_.erase(n->out()->idx());
      return slots_[n->a()->idx()] != Slot::span;
    }
    if (const auto* n = instruction.op_as_SliceUpdateNode()) {
      return visit_update(*n);
    }
    if (const auto* n = instruction.op_as_SliceNode(); n != nullptr && slots_[n->x()->idx()] == Slot::updated) {
      const bool fits = !n->start()->is_vid() && n->start()->literal() == 0 && is_axis_of_positions(*n) &&
          add(*n->stop(), use_.stops);
      slots_[n->out()->idx()] = Slot::span;
      return fits;
    }
    if (const auto* n = instruction.op_as_SdpaNode()) {
      const bool fits = slots_[n->q()->idx()] == Slot::other && slots_[n->k()->idx()] == Slot::span &&
          slots_[n->v()->idx()] == Slot::span && n->mask() == nullptr;
      slots_[n->out()->idx()] = Slot::other;
      return fits && !reads_value(instruction);
    }
    if (const auto* n = instruction.op_as_RopeNode()) {
      const bool fits = !n->offset()->is_vid() && slots_[n->offset()->tid()->idx()] == Slot::position &&
          slots_[n->x()->idx()] == Slot::other;
      slots_[n->out()->idx()] = Slot::other;
      return fits && !reads_value(instruction);
    }
    return visit_other(instruction);
  }

  bool is_input(const fb::Tid& tid) const {
    return tid.idx() >= program_.layout.inputs_begin() && tid.idx() < program_.layout.outputs_begin();
  }

  bool visit_arithmetic(const DecodedInstruction& decoded) {
    uint32_t out = 0;
    bool depends = false;
    for_each_value_slot(*decoded.source, [&](uint32_t value, bool is_output) {
      out = is_output ? value : out;
      depends |= !is_output && values_.contains(value);
    });
    if (depends) {
      values_.insert(out);
      use_.arithmetic.push_back(&decoded);
    } else {
      values_.erase(out);
    }
    return true;
  }

  bool visit_update(const fb::SliceUpdateParams& n) {
    const bool is_cache = program_.layout.is_buffer(n.dst()->idx()) && n.dst()->idx() == n.out()->idx() &&
        slots_[n.dst()->idx()] == Slot::other && slots_[n.update()->idx()] == Slot::other;
    slots_[n.out()->idx()] = Slot::updated;
    return is_cache && is_axis_of_positions(n) && add(*n.start(), use_.starts) && add(*n.stop(), use_.stops);
  }

  template <typename Node>
  bool is_axis_of_positions(const Node& n) const {
    return !n.axis()->is_vid() && n.axis()->literal() == 2 && n.step() == 1;
  }

  // Adds a value that depends on the position.
  bool add(const fb::IntOrVid& x, std::vector<uint32_t>& values) {
    if (!x.is_vid() || !values_.contains(x.vid()->idx())) {
      return false;
    }
    values.push_back(x.vid()->idx());
    return true;
  }

  bool reads_value(const fb::Instruction& instruction) const {
    bool reads = false;
    for_each_value_slot(instruction, [&](uint32_t value, bool) { reads |= values_.contains(value); });
    return reads;
  }

  bool visit_other(const fb::Instruction& instruction) {
    const auto op = instruction.op_type();
    const bool keeps = op == fb::OpNode::ReshapeNode || op == fb::OpNode::AsTypeNode;
    bool fits = (reads_no_elements(op) || op == fb::OpNode::SliceNode) && !reads_value(instruction);
    Slot result = Slot::other;
    for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
      if (access == Access::write) {
        return;
      }
      const Slot slot = slots_[tid.idx()];
      fits = fits && access == Access::read && (slot == Slot::other || (slot == Slot::position && keeps)) &&
          (slot == Slot::position || !is_input(tid) || op == fb::OpNode::TakeNode || op == fb::OpNode::SampleNode);
      result = slot == Slot::other ? result : slot;
    });
    for_each_tensor_slot(instruction, [&](const fb::Tid& tid, Access access) {
      if (access == Access::write) {
        slots_[tid.idx()] = result;
        fits = fits && !program_.layout.is_buffer(tid.idx());
      }
    });
    return fits;
  }

  const MlxProgram& program_;
  std::vector<Slot> slots_;
  std::set<uint32_t> values_; // that depend on the position
  PositionUse use_{};
};

} // namespace

std::optional<PositionUse> find_position_use(const MlxProgram& program) { return Follower(program).follow(); }

} // namespace executorch_mlx
