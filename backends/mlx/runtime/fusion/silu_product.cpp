#include "fusion/silu_product.h"

#include <memory>
#include <utility>

#include "call/context.h"
#include "fusion/patterns.h"
#include "gpu/fused.h"

namespace executorch_mlx {

bool LeftSilu::run(Context& c) const {
  if (!gate_ || !gate_->is_left(c)) {
    c.hold(held_, c.in(x_));
  }
  return true;
}

bool SiluProduct::run(Context& c) const {
  const auto gate_vectors = gate_product ? gate_product->take_vectors(c) : std::nullopt;
  const auto up_vectors = up_product ? up_product->take_vectors(c) : std::nullopt;
  const auto operand = c.take_held(gate);
  std::optional<mx::array> y;
  if (gate_vectors && up_vectors && gate_product->vectors == up_product->vectors) {
    y = gpu::gated_products(
        *gate_vectors, gate_product->operands.weights(c), up_product->operands.weights(c), c.stream);
  }
  if (!y) {
    const auto x = gate_vectors ? gate_product->product_of(*gate_vectors, c) : operand.value();
    const auto other = up_vectors ? up_product->product_of(*up_vectors, c) : c.in(up);
    y = gpu::silu_product(x, other, c.stream);
    y = y ? *y : mx::multiply(mx::multiply(x, mx::sigmoid(x, c.stream), c.stream), other, c.stream);
  }
  c.set(out, *y);
  return true;
}

namespace {

// The SiluNode whose result an instruction reads from a slot, if nothing else reads it. Else kNone.
size_t silu_of(const MlxProgram& program, const Dataflow& flow, size_t chain, size_t reader, const fb::Tid* slot) {
  const auto& value = flow.value(flow.read(chain, reader, slot));
  if (value.writer == SlotValue::kNoWriter || value.reads != 1 || flow.escapes(value)) {
    return Dataflow::kNone;
  }
  const auto* n = program.chains[chain].instructions[value.writer].source->op_as_SiluNode();
  return n == nullptr || program.layout.is_buffer(n->x()->idx()) ? Dataflow::kNone : value.writer;
}

} // namespace

void find_silu_products(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    auto& instructions = program.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      const auto* n = instructions[i].source->op_as_MultiplyNode();
      if (n == nullptr) {
        continue;
      }
      const bool is_second = silu_of(program, flow, chain, i, n->a()) == Dataflow::kNone;
      const size_t at = silu_of(program, flow, chain, i, is_second ? n->b() : n->a());
      if (at == Dataflow::kNone) {
        continue;
      }
      const auto* x = instructions[at].source->op_as_SiluNode()->x();
      auto fused = std::make_unique<SiluProduct>();
      fused->gate = program.layout.add_held();
      fused->up = is_second ? n->a() : n->b();
      fused->out = n->out();
      fused->gate_product = RowProduct::leave(program, flow, chain, at, x);
      fused->up_product = RowProduct::leave(program, flow, chain, i, fused->up);
      instructions[at].fused = std::make_unique<LeftSilu>(x, fused->gate, fused->gate_product);
      instructions[i].fused = std::move(fused);
    }
  }
}

} // namespace executorch_mlx
