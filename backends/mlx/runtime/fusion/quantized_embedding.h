// Rows of a quantized table, which a kernel for NVIDIA GPUs makes numbers of: the TakeNodes of integers, scales and
// biases, their conversions to float32, the DequantizeNode, and the conversion of its result.
#pragma once

#include "program/program.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

// Belongs to the first TakeNode.
class QuantizedEmbedding : public FusedInstruction {
 public:
  static constexpr uint32_t kLength = 7;

  QuantizedEmbedding(const fb::TakeParams& w, const fb::TakeParams& scales, const fb::TakeParams& biases,
      const fb::DequantizeParams& numbers, const fb::AsTypeParams& result)
      : FusedInstruction(kLength), w_(w), scales_(scales), biases_(biases), numbers_(numbers), result_(result) {}

  bool run(Context& c) const override;

 private:
  const fb::TakeParams& w_;
  const fb::TakeParams& scales_;
  const fb::TakeParams& biases_;
  const fb::DequantizeParams& numbers_;
  const fb::AsTypeParams& result_;
};

} // namespace executorch_mlx
