// The RMSNorm of a sum, which a kernel for NVIDIA GPUs computes with the sum.
#pragma once

#include "program/program.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

// Belongs to the RMSNormNode.
class SumAndNorm : public FusedInstruction {
 public:
  SumAndNorm(const fb::RMSNormParams& norm, uint32_t operands) : norm_(norm), operands_(operands) {}

  bool run(Context& c) const override;

 private:
  const fb::RMSNormParams& norm_;
  uint32_t operands_; // where the AddNode leaves its operands: see HeldOperands
};

} // namespace executorch_mlx
