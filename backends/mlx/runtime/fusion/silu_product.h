// The product of SiLU and another value, silu(gate) * up, which a kernel for NVIDIA GPUs computes. If gate and up are
// products of the same few vectors with constant matrices, another kernel computes these, too.
#pragma once

#include <optional>

#include "program/program.h"
#include "fusion/row_product.h"

namespace executorch_mlx {

// The SiluNode leaves its operand to the MultiplyNode, the only instruction that reads its result.
class LeftSilu : public FusedInstruction {
 public:
  LeftSilu(const fb::Tid* x, uint32_t held, std::optional<RowProduct> gate) : x_(x), held_(held), gate_(gate) {}

  bool run(Context& c) const override;

 private:
  const fb::Tid* x_;
  uint32_t held_;
  std::optional<RowProduct> gate_; // if x is a LeftProduct
};

// Belongs to the MultiplyNode.
class SiluProduct : public FusedInstruction {
 public:
  bool run(Context& c) const override;

  uint32_t gate; // where the LeftSilu leaves its operand
  const fb::Tid* up;
  const fb::Tid* out;
  std::optional<RowProduct> gate_product, up_product; // if they are LeftProducts
};

} // namespace executorch_mlx
