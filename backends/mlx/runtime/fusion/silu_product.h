// The product of SiLU and another value, which a kernel for NVIDIA GPUs computes with the SiLU: silu(gate) * up. If
// gate and up are products of the same few vectors with constant matrices, another kernel computes these, too.
#pragma once

#include <optional>

#include "fusion/fused_instruction.h"
#include "fusion/row_product.h"

namespace executorch_mlx {

// Belongs to the MultiplyNode.
class SiluProduct : public FusedInstruction {
 public:
  bool run(Context& c) const override;

  uint32_t gate; // where the SiluNode leaves its operand: see HeldOperands
  const fb::Tid* up;
  const fb::Tid* out;
  std::optional<RowProduct> gate_product;
  const fb::Tid* up_matrix; // if there is a gate_product
};

} // namespace executorch_mlx
