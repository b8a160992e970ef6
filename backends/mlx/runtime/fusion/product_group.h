// Groups of matrix products with a common operand, which the runtime computes together if this operand has few rows:
// for example, the query, key and value of an attention layer. The threads are started once for all products, and work
// that depends only on the operand is done once.
//
// On a GPU, a single product is a group, too.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <mlx/mlx.h>

#include "fusion/row_product.h"
#include "program/program.h"

namespace executorch_mlx {

namespace mx = mlx::core;

// Products of one chain. They multiply the same value by constant matrices. The group belongs to the first one.
class ProductGroup : public FusedInstruction {
 public:
  // Computes the products, unless an operand is invalid or there is no kernel, and leaves them in the slots `early` of
  // the members. On a CPU, those of AddmmNodes are as products_by_constants() says. On a GPU, only AddmmNodes without a
  // bias have a kernel.
  bool run(Context& c) const override;

  fb::OpNode op; // of all members: AddmmNode, QuantizedMatmulNode or Int8QuantizedMatmulNode
  std::optional<VectorNorm> norm; // of the operand, on a GPU
  std::vector<const DecodedInstruction*> members;

 private:
  std::optional<std::vector<mx::array>> compute(Context& c) const;
};

} // namespace executorch_mlx
