// Visits the tensor slots that an instruction reads and writes.
#pragma once

#include <cstdint>
#include <vector>

#include "../serialization/output_fields.h"
#include "program/reflect.h"

namespace executorch_mlx {

// Whether an instruction runs other chains.
inline bool is_control(const fb::Instruction& instruction) {
  const auto op = instruction.op_type();
  return op == fb::OpNode::IfNode || op == fb::OpNode::WhileNode || op == fb::OpNode::ScanNode;
}

// The chains that an instruction runs.
inline std::vector<int64_t> called_chains(const fb::Instruction& instruction) {
  if (const auto* node = instruction.op_as_IfNode()) {
    return {node->then_chain_idx(), node->else_chain_idx()};
  }
  if (const auto* node = instruction.op_as_WhileNode()) {
    return {node->cond_chain_idx(), node->body_chain_idx()};
  }
  if (const auto* node = instruction.op_as_ScanNode()) {
    return {node->body_chain_idx()};
  }
  return {};
}

enum class Access { read, write, read_and_write };

// Calls visit(tid, access) with each tensor slot in the fields of a verified instruction. The slots that the chains of
// a control instruction read and write are not visited.
template <typename Visit>
void for_each_tensor_slot(const fb::Instruction& instruction, Visit&& visit) {
  const auto visit_field = [&](const Field& field) {
    if (field.value == nullptr) {
      return;
    }
    const Access access = !is_output_field(field.name) ? Access::read
        : is_inout_field(field.name)                   ? Access::read_and_write
                                                       : Access::write;
    if (field.is(fb::TidTypeTable) && field.repeated) {
      for (const auto* tid : field.vector<const fb::Tid*>()) {
        visit(*tid, access);
      }
    } else if (field.is(fb::TidTypeTable)) {
      visit(field.structure<fb::Tid>(), access);
    } else if (field.is(fb::VidOrTidTypeTable)) {
      const auto& x = field.table<fb::VidOrTid>();
      if (!x.is_vid()) {
        visit(*x.tid(), access);
      }
    } else if (field.is(fb::IntOrVidOrTidTypeTable)) {
      const auto& x = field.table<fb::IntOrVidOrTid>();
      if (x.kind() == 2) {
        visit(*x.tid(), access);
      }
    }
  };
  for_each_field(
      *static_cast<const flatbuffers::Table*>(instruction.op()), type_of(instruction.op_type()), visit_field);
}

} // namespace executorch_mlx
