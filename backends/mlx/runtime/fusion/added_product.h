// The sum of a value and a product of many rows, which MLX's matrix product computes together on an NVIDIA GPU: that of
// a LoRA adapter, and those of gradients.
#pragma once

#include <memory>
#include <utility>

#include "program/program.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

// Belongs to the AddNode. The AddmmNode leaves its operands, and runs lazily, too.
class AddedProduct : public FusedInstruction {
 public:
  AddedProduct(const fb::BinaryNode& node, const fb::Tid* added, uint32_t held,
      std::unique_ptr<const FusedInstruction> of_few_rows)
      : node_(node), added_(added), held_(held), of_few_rows_(std::move(of_few_rows)) {}

  bool run(Context& c) const override;

 private:
  const fb::BinaryNode& node_;
  const fb::Tid* added_;
  uint32_t held_; // the first of the two operands of the product
  std::unique_ptr<const FusedInstruction> of_few_rows_; // what computes the sum of few rows, or null
};

} // namespace executorch_mlx
