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
  for_each_sum(program, [&](size_t chain, size_t i, const fb::BinaryNode& n, const fb::Tid* a, const fb::Tid* b) {
    const auto product = RowProduct::leave(program, flow, chain, i, a);
    if (product) {
      auto fused = std::make_unique<ProductAndSum>();
      fused->product = *product;
      fused->added = b;
      fused->out = n.out();
      program.chains[chain].instructions[i].fused = std::move(fused);
    }
    return product.has_value();
  });
}

} // namespace executorch_mlx
