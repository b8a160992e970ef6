// A product with a constant matrix in float32, and the activation or the sum with another value that follows it. A CPU
// kernel computes both while the results are in the cache.
#pragma once

#include "ops/cpu/cpu_kernels.h"
#include "program/program.h"

namespace executorch_mlx {

// Belongs to the AddmmNode.
class ProductEpilogue : public FusedInstruction {
 public:
  explicit ProductEpilogue(uint32_t list_elements) : FusedInstruction(2, list_elements) {}

  bool run(Context& c) const override;

  const DecodedInstruction* product;
  Elementwise activation = Elementwise::copy; // of FloatResults
  const fb::Tid* other = nullptr; // what is added, or what the maximum compares with: has to be 0
  const fb::Tid* out;
};

} // namespace executorch_mlx
