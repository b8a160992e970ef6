#include "fusion/product_and_sum.h"

#include <memory>
#include <utility>

#include "call/context.h"
#include "fusion/patterns.h"
#include "gpu/fused.h"

namespace executorch_mlx {

bool ProductAndSum::run(Context& c) const {
  const auto vectors = product.take_vectors(c);
  if (!vectors) {
    return false;
  }
  const auto y = gpu::product_and_sum(*vectors, product.operands.weights(c), c.in(added), c.stream);
  c.set(out, y ? *y : mx::add(product.product_of(*vectors, c), c.in(added), c.stream));
  return true;
}

void find_products_and_sums(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    auto& instructions = program.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      const auto* n = instructions[i].source->op_as_AddNode();
      if (n == nullptr) {
        continue;
      }
      for (const auto& [a, b] : {std::pair(n->b(), n->a()), std::pair(n->a(), n->b())}) {
        if (const auto product = RowProduct::leave(program, flow, chain, i, a)) {
          auto fused = std::make_unique<ProductAndSum>();
          fused->product = *product;
          fused->added = b;
          fused->out = n->out();
          instructions[i].fused = std::move(fused);
          break;
        }
      }
    }
  }
}

} // namespace executorch_mlx
