#include "fusion/row_product.h"

#include "call/context.h"
#include "fusion/patterns.h"

namespace executorch_mlx {

std::optional<VectorNorm> VectorNorm::find(MlxProgram& program, const Dataflow& flow, size_t chain, uint32_t value) {
  const uint32_t writer = flow.value(value).writer;
  if (writer == SlotValue::kNoWriter) {
    return std::nullopt;
  }
  auto& instruction = program.chains[chain].instructions[writer];
  const auto* n = instruction.source->op_as_RMSNormNode();
  if (n == nullptr || n->weight() == nullptr) {
    return std::nullopt;
  }
  return VectorNorm{hold_operands(program, instruction, {n->x(), n->weight()}, kMaxRowsOnGpu), n->eps()};
}

gpu::Vectors vectors_of(const mx::array& x, const std::optional<VectorNorm>& norm, const Context& c) {
  const auto& before = norm ? c.held(norm->operands) : std::nullopt;
  return before ? gpu::Vectors{*before, c.held(norm->operands + 1), norm->eps} : gpu::Vectors{x};
}

std::optional<RowProduct> RowProduct::find(
    MlxProgram& program, const Dataflow& flow, size_t chain, size_t instruction) {
  if (instruction == Dataflow::kNone) {
    return std::nullopt;
  }
  auto& decoded = program.chains[chain].instructions[instruction];
  const auto* n = decoded.source->op_as_AddmmNode();
  if (n == nullptr || decoded.matrix == nullptr) {
    return std::nullopt;
  }
  const uint32_t vectors = flow.read(chain, instruction, n->mat1());
  return RowProduct{vectors, hold_operands(program, decoded, {n->mat1()}, kMaxRowsOnGpu),
      VectorNorm::find(program, flow, chain, vectors), decoded.matrix};
}

std::optional<gpu::Vectors> RowProduct::take_vectors(Context& c) const {
  const auto x = c.take_held(operand);
  return x ? std::optional(vectors_of(*x, norm, c)) : std::nullopt;
}

} // namespace executorch_mlx
