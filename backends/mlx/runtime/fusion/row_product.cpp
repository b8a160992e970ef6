#include "fusion/row_product.h"

#include <memory>
#include <utility>

#include "call/context.h"
#include "fusion/patterns.h"
#include "gpu/verdicts.h"
#include "ops/quant.h"

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
  if (norm) {
    const auto& before = c.held(norm->operands);
    const auto& weight = c.held(norm->operands + 1);
    if (before && before->dtype() == x.dtype() && weight->dtype() == x.dtype()) {
      return {*before, *weight, norm->eps};
    }
  }
  return {x};
}

std::optional<ProductOperands> ProductOperands::of(const MlxProgram& program, const DecodedInstruction& instruction) {
  if (const auto* n = instruction.source->op_as_AddmmNode()) {
    return instruction.matrix == nullptr ? std::nullopt
                                         : std::optional(ProductOperands{n->mat1(), instruction.matrix, nullptr});
  }
  const auto is_constant = [&](const fb::Tid* slot) {
    return slot != nullptr && slot->idx() < program.layout.constants;
  };
  const auto* n = instruction.source->op_as_QuantizedMatmulNode();
  const bool fits = n != nullptr && n->transpose() && n->mode()->string_view() == "affine" && is_constant(n->w()) &&
      is_constant(n->scales()) && is_constant(n->biases());
  return fits && gpu::is_used(gpu::Kernel::quantized_products, mx::Stream(0, program.device))
      ? std::optional(ProductOperands{n->x(), nullptr, n})
      : std::nullopt;
}

gpu::Matrix ProductOperands::weights(Context& c) const {
  if (quantized == nullptr) {
    return c.in(matrix);
  }
  auto q = read_weights(*quantized, c);
  return {std::move(q.w), std::move(q.scales), std::move(*q.biases), quantized->group_size(), quantized->bits()};
}

bool LeftProduct::run(Context& c) const {
  const auto& x = c.in(operands_.x);
  const auto matrix = operands_.weights(c);
  if (!gpu::can_multiply({x}, {matrix}, c.stream)) {
    c.release(held_);
    return false;
  }
  auto shape = x.shape();
  shape.back() = matrix.w.shape(0);
  c.expect_product(shape, x.dtype(), x.shape(-1));
  c.hold(held_, x);
  return true;
}

std::optional<RowProduct> RowProduct::leave(
    MlxProgram& program, const Dataflow& flow, size_t chain, size_t reader, const fb::Tid* slot) {
  const auto& product = flow.value(flow.read(chain, reader, slot));
  if (product.writer == SlotValue::kNoWriter || product.reads != 1 || flow.escapes(product)) {
    return std::nullopt;
  }
  auto& instruction = program.chains[chain].instructions[product.writer];
  const auto operands = ProductOperands::of(program, instruction);
  if (!operands || program.layout.is_buffer(operands->x->idx())) {
    return std::nullopt;
  }
  const uint32_t held = program.layout.add_held();
  const uint32_t vectors = flow.read(chain, product.writer, operands->x);
  instruction.fused = std::make_unique<LeftProduct>(*operands, held);
  return RowProduct{vectors, held, VectorNorm::find(program, flow, chain, vectors), *operands};
}

bool RowProduct::is_left(const Context& c) const { return c.held(held).has_value(); }

std::optional<gpu::Vectors> RowProduct::take_vectors(Context& c) const {
  const auto x = c.take_held(held);
  return x ? std::optional(vectors_of(*x, norm, c)) : std::nullopt;
}

mx::array RowProduct::product_of(const gpu::Vectors& vectors, Context& c) const {
  return (*gpu::products_of_row(vectors, {operands.weights(c)}, c.stream))[0];
}

} // namespace executorch_mlx
