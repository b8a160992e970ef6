#include "call/position.h"

#include <algorithm>
#include <set>
#include <utility>
#include <variant>

#include "call/call_io.h"
#include "dtype.h"
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

// Whether a kernel computes the op. Other ops only give an array another shape or dtype.
bool computes(fb::OpNode op) {
  using fb::OpNode;
  static constexpr OpNode kOps[] = {OpNode::AddmmNode, OpNode::AddNode, OpNode::DequantizeNode, OpNode::MultiplyNode,
      OpNode::QuantizedMatmulNode, OpNode::RMSNormNode, OpNode::RowSdpaNode, OpNode::SampleNode, OpNode::SdpaNode,
      OpNode::SiluNode};
  return std::find(std::begin(kOps), std::end(kOps), op) != std::end(kOps);
}

// Follows the positions through the main chain, up to the first instruction that uses them in another way. Each visit
// changes the result only if the instruction fits.
class Follower {
 public:
  explicit Follower(const MlxProgram& program) : program_(program), slots_(program.layout.num_tensors()) {}

  std::optional<PositionUse> follow() {
    const auto input = input_slot(program_, "input_pos");
    if (!input) {
      return std::nullopt;
    }
    use_.input = *input;
    use_.read = {*input};
    slots_[*input] = Slot::position;
    const auto& instructions = program_.chains[program_.graph->main_chain_idx()].instructions;
    size_t arithmetic = 0; // up to use_.end
    for (size_t i = 0, next = 0; i < instructions.size() && visit(instructions[i]); ++i) {
      next = std::max(next, i + (instructions[i].fused ? instructions[i].fused->length : 1));
      // What follows the last kernel is left to the interpreter, and so is a group of fused instructions that does not
      // fit as a whole.
      if (computes(instructions[i].source->op_type()) && next == i + 1) {
        use_.end = next;
        arithmetic = use_.arithmetic.size();
      }
    }
    use_.arithmetic.resize(arithmetic);
    const bool has_attention = !use_.rows.empty() && !use_.rows[0].starts.empty() && !use_.rows[0].places.empty();
    return has_attention && use_.end > 0 ? std::optional(std::move(use_)) : std::nullopt;
  }

 private:
  // What a tensor slot holds.
  enum class Slot {
    other,
    position, // the input, or the same number in another shape or dtype
    updated, // a KV cache with the new token
    span, // positions of an updated KV cache
    range, // integers that do not depend on the call
    number // one or some of them, on the host
  };

  // Each of these returns whether the instruction fits.
  bool visit(const DecodedInstruction& decoded) {
    const auto& instruction = *decoded.source;
    const auto op = instruction.op_type();
    if (const auto* n = instruction.op_as_ItemIntNode()) {
      const bool fits = n->x()->idx() == use_.input || slots_[n->x()->idx()] == Slot::number;
      values_.insert(n->out()->idx());
      use_.arithmetic.push_back(&decoded);
      return fits;
    }
    if (op == fb::OpNode::ARangeNode || is_element_of_range(instruction)) {
      return visit_numbers(decoded);
    }
    if (is_arithmetic(op)) {
      return visit_arithmetic(decoded);
    }
    if (const auto* n = instruction.op_as_SymSizeNode()) {
      values_.erase(n->out()->idx());
      return slots_[n->a()->idx()] != Slot::span;
    }
    if (const auto* n = instruction.op_as_SliceUpdateNode()) {
      return is_axis_of_positions(*n) && depends(*n->start()) && depends(*n->stop()) && rows(1) &&
          visit_update(n->dst(), n->update(), n->out()) && add({n->start()}, &PositionUse::Row::places) &&
          add({n->stop()}, &PositionUse::Row::stops);
    }
    if (const auto* n = instruction.op_as_RowUpdateNode()) {
      const auto starts = list(*n->starts());
      return all_depend(starts) && rows(starts.size()) && visit_update(n->dst(), n->update(), n->out()) &&
          add(starts, &PositionUse::Row::places);
    }
    if (const auto* n = instruction.op_as_SliceNode(); n != nullptr && slots_[n->x()->idx()] == Slot::updated) {
      slots_[n->out()->idx()] = Slot::span;
      return is_axis_of_positions(*n) && depends(*n->stop()) && rows(1) &&
          add({n->start()}, &PositionUse::Row::starts) && add({n->stop()}, &PositionUse::Row::stops);
    }
    if (const auto* n = instruction.op_as_SdpaNode()) {
      const bool fits = are_attended(n->q(), n->k(), n->v(), Slot::span) && n->mask() == nullptr;
      slots_[n->out()->idx()] = Slot::other;
      return fits && !reads_value(instruction);
    }
    if (const auto* n = instruction.op_as_RowSdpaNode()) {
      const bool fits =
          are_attended(n->q(), n->k(), n->v(), Slot::updated) && (n->masks() == nullptr || n->masks()->size() == 0);
      const auto starts = list(*n->starts()), stops = list(*n->stops());
      slots_[n->out()->idx()] = Slot::other;
      return fits && all_depend(stops) && starts.size() == stops.size() && rows(starts.size()) &&
          add(starts, &PositionUse::Row::starts) && add(stops, &PositionUse::Row::stops);
    }
    if (const auto* n = instruction.op_as_RopeNode()) {
      const bool fits = !n->offset()->is_vid() && slots_[n->offset()->tid()->idx()] == Slot::position &&
          slots_[n->x()->idx()] == Slot::other;
      slots_[n->out()->idx()] = Slot::other;
      return fits && !reads_value(instruction);
    }
    return visit_other(instruction);
  }

  // Whether all attention of the program has so many rows.
  bool rows(size_t count) {
    if (use_.rows.empty()) {
      use_.rows.resize(count);
    }
    return count > 0 && use_.rows.size() == count;
  }

  // Adds a bound of each row.
  bool add(const std::vector<const fb::IntOrVid*>& bounds, std::vector<const fb::IntOrVid*> PositionUse::Row::* kind) {
    for (size_t i = 0; i < bounds.size(); ++i) {
      (use_.rows[i].*kind).push_back(bounds[i]);
    }
    return true;
  }

  static std::vector<const fb::IntOrVid*> list(const flatbuffers::Vector<flatbuffers::Offset<fb::IntOrVid>>& x) {
    return {x.begin(), x.end()};
  }

  bool are_attended(const fb::Tid* q, const fb::Tid* k, const fb::Tid* v, Slot keys) const {
    return slots_[q->idx()] == Slot::other && slots_[k->idx()] == keys && slots_[v->idx()] == keys;
  }

  bool is_input(const fb::Tid& tid) const {
    return tid.idx() >= program_.layout.inputs_begin() && tid.idx() < program_.layout.outputs_begin();
  }

  bool visit_arithmetic(const DecodedInstruction& decoded) {
    uint32_t out = 0;
    for_each_value_slot(*decoded.source, [&](uint32_t value, bool is_output) { out = is_output ? value : out; });
    if (reads_value(*decoded.source)) {
      values_.insert(out);
      use_.arithmetic.push_back(&decoded);
    } else {
      values_.erase(out);
    }
    return true;
  }

  // Exported programs check positions and rows: they read an element of a range, which the host computes at once.
  bool is_element_of_range(const fb::Instruction& instruction) const {
    if (const auto* n = instruction.op_as_TakeNode()) {
      const Slot x = slots_[n->x()->idx()];
      return (x == Slot::range || x == Slot::number) && n->index()->kind() != 2;
    }
    const auto* n = instruction.op_as_GatherNode();
    return n != nullptr && slots_[n->x()->idx()] == Slot::range && n->indices()->size() == 1 &&
        is_input(*n->indices()->Get(0));
  }

  bool visit_numbers(const DecodedInstruction& decoded) {
    const bool is_range = decoded.source->op_type() == fb::OpNode::ARangeNode;
    if (const auto* n = decoded.source->op_as_GatherNode()) {
      use_.read.push_back(n->indices()->Get(0)->idx());
    }
    use_.arithmetic.push_back(&decoded);
    for_each_tensor_slot(*decoded.source, [&](const fb::Tid& tid, Access access) {
      if (access == Access::write) {
        slots_[tid.idx()] = is_range ? Slot::range : Slot::number;
      }
    });
    return !is_range || !reads_value(*decoded.source);
  }

  bool visit_update(const fb::Tid* dst, const fb::Tid* update, const fb::Tid* out) {
    const bool is_cache = program_.layout.is_buffer(dst->idx()) &&
        is_float(dtype_of(program_.meta(dst->idx()).scalar_type())) && dst->idx() == out->idx() &&
        slots_[dst->idx()] == Slot::other && slots_[update->idx()] == Slot::other;
    if (is_cache) {
      slots_[out->idx()] = Slot::updated;
      use_.caches.push_back(dst->idx());
    }
    return is_cache;
  }

  template <typename Node>
  bool is_axis_of_positions(const Node& n) const {
    return !n.axis()->is_vid() && n.axis()->literal() == 2 && n.step() == 1;
  }

  bool depends(const fb::IntOrVid& x) const { return x.is_vid() && values_.contains(x.vid()->idx()); }

  bool all_depend(const std::vector<const fb::IntOrVid*>& numbers) const {
    return std::all_of(numbers.begin(), numbers.end(), [&](const auto* x) { return depends(*x); });
  }

  bool reads_value(const fb::Instruction& instruction) const {
    bool reads = false;
    for_each_value_slot(
        instruction, [&](uint32_t value, bool is_output) { reads |= !is_output && values_.contains(value); });
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
          (slot == Slot::position || !is_input(tid) || op == fb::OpNode::ReshapeNode || op == fb::OpNode::TakeNode ||
              op == fb::OpNode::SampleNode);
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

std::optional<std::vector<TokenPlace>> PositionUse::places(
    std::span<const int64_t> positions, const std::vector<Value>& values) const {
  const auto integer = [&](const fb::IntOrVid* x) -> int64_t {
    if (!x->is_vid()) {
      return x->literal();
    }
    const auto* value = std::get_if<int64_t>(&values[x->vid()->idx()]);
    return value != nullptr ? *value : -1;
  };
  const auto all_are = [&](const std::vector<const fb::IntOrVid*>& numbers, int64_t expected) {
    return std::all_of(numbers.begin(), numbers.end(), [&](const auto* x) { return integer(x) == expected; });
  };
  std::vector<TokenPlace> result;
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& row = rows[i];
    const int64_t start = integer(row.starts[0]), stop = integer(row.stops[0]);
    const bool are_valid = positions[i] >= 0 && std::in_range<int>(positions[i]) && start >= 0 && start < stop &&
        std::in_range<int>(stop) && all_are(row.starts, start) && all_are(row.stops, stop) &&
        all_are(row.places, stop - 1);
    if (!are_valid) {
      return std::nullopt;
    }
    result.push_back({static_cast<int>(positions[i]), {static_cast<int>(start), static_cast<int>(stop)}});
  }
  return result;
}

std::optional<PositionUse> find_position_use(const MlxProgram& program) { return Follower(program).follow(); }

} // namespace executorch_mlx
