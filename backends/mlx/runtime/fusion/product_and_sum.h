// The sum of a product and another value, often the residual, which a kernel for NVIDIA GPUs computes with the product.
#pragma once

#include "program/program.h"
#include "fusion/row_product.h"

namespace executorch_mlx {

// Belongs to the AddNode.
class ProductAndSum : public FusedInstruction {
 public:
  bool run(Context& c) const override;

  RowProduct product;
  const fb::Tid* added;
  const fb::Tid* out;
};

} // namespace executorch_mlx
