#include "fusion/silu_product.h"

#include <memory>
#include <utility>

#include "call/context.h"
#include "fusion/patterns.h"
#include "gpu/fused.h"

namespace executorch_mlx {

bool SiluProduct::run(Context& c) const {
  const auto gate_value = c.take_held(gate);
  if (!gate_value) {
    return false;
  }
  const auto& up_value = c.in(up);
  const auto vectors = gate_product ? gate_product->take_vectors(c) : std::nullopt;
  auto y =
      vectors ? gpu::gated_products(*vectors, c.in(gate_product->matrix), c.in(up_matrix), c.stream) : std::nullopt;
  if (!y) {
    y = gpu::silu_product(*gate_value, up_value, c.stream);
  }
  if (y) {
    c.set(out, *y);
  }
  return y.has_value();
}

void find_silu_products(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    auto& instructions = program.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      const auto* n = instructions[i].source->op_as_MultiplyNode();
      if (n == nullptr) {
        continue;
      }
      for (const auto& [a, b] : {std::pair(n->a(), n->b()), std::pair(n->b(), n->a())}) {
        const size_t writer = flow.writer(chain, i, a);
        const auto* silu = writer == Dataflow::kNone ? nullptr : instructions[writer].source->op_as_SiluNode();
        if (silu == nullptr) {
          continue;
        }
        auto fused = std::make_unique<SiluProduct>();
        fused->gate = hold_operands(program, instructions[writer], {silu->x()});
        fused->up = b;
        fused->out = n->out();
        const auto of_gate = RowProduct::find(program, flow, chain, flow.writer(chain, writer, silu->x()));
        const auto of_up = RowProduct::find(program, flow, chain, flow.writer(chain, i, b));
        if (of_gate && of_up && of_gate->vectors == of_up->vectors) {
          fused->gate_product = of_gate;
          fused->up_matrix = of_up->matrix;
        }
        instructions[i].fused = std::move(fused);
        break;
      }
    }
  }
}

} // namespace executorch_mlx
