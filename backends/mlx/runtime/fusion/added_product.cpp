#include "fusion/added_product.h"

#include <algorithm>
#include <optional>

#include "call/context.h"
#include "fusion/patterns.h"
#include "fusion/row_product.h"

namespace executorch_mlx {

namespace {

// Lets the product that an instruction reads from a slot leave its operands, if nothing else reads its result. Returns
// the number of the first one.
std::optional<uint32_t> leave_operands(
    MlxProgram& program, const Dataflow& flow, size_t chain, size_t reader, const fb::Tid* slot) {
  const auto& product = flow.value(flow.read(chain, reader, slot));
  if (product.writer == SlotValue::kNoWriter || product.reads != 1 || flow.escapes(product)) {
    return std::nullopt;
  }
  auto& instruction = program.chains[chain].instructions[product.writer];
  const auto* n = instruction.source->op_as_AddmmNode();
  const bool fits = n != nullptr && n->bias() == nullptr && n->alpha() == 1.0f && instruction.fused == nullptr &&
      instruction.early == DecodedInstruction::kNone && instruction.operands == nullptr &&
      !program.layout.is_buffer(n->mat1()->idx()) && !program.layout.is_buffer(n->mat2()->idx());
  return fits ? std::optional(hold_operands(program, instruction, {n->mat1(), n->mat2()})) : std::nullopt;
}

} // namespace

bool AddedProduct::run(Context& c) const {
  const auto a = c.take_held(held_), b = c.take_held(held_ + 1);
  if (of_few_rows_ && of_few_rows_->run(c)) {
    return true;
  }
  if (!a || !b || !c.slot(added_)) {
    return false;
  }
  const auto& x = c.in(added_);
  const bool is_product = a->ndim() >= 2 && b->ndim() == 2 && x.ndim() == a->ndim() && x.shape(-1) == b->shape(1) &&
      std::equal(x.shape().begin(), x.shape().end() - 1, a->shape().begin());
  const bool has_many_rows = a->size() > 0 && static_cast<int64_t>(a->size()) / a->shape(-1) > kMaxRowsOnGpu;
  if (!is_product || !has_many_rows || a->dtype() != x.dtype() || b->dtype() != x.dtype()) {
    return false;
  }
  c.set(node_.out(), mx::addmm(x, *a, *b, 1.0f, 1.0f, c.stream));
  return true;
}

void find_added_products(MlxProgram& program, const Dataflow& flow) {
  for_each_sum(program, [&](size_t chain, size_t i, const fb::BinaryNode& n, const fb::Tid* product, const fb::Tid* x) {
    const auto held = leave_operands(program, flow, chain, i, product);
    if (held) {
      auto& fused = program.chains[chain].instructions[i].fused;
      fused = std::make_unique<AddedProduct>(n, x, *held, std::move(fused));
    }
    return held.has_value();
  });
}

} // namespace executorch_mlx
