// Attention with a bool mask, after which queries that see no key get zeros, as torch defines it: an SdpaNode, then
// where(any(mask, -1), its result, 0). A CPU kernel writes the zeros, and the WhereNode has nothing to do.
#pragma once

#include "program/program.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

// Belongs to the SdpaNode.
class MaskedAttention : public FusedInstruction {
 public:
  MaskedAttention(const fb::SdpaParams& node, const fb::Tid* otherwise, uint32_t held)
      : node_(node), otherwise_(otherwise), held_(held) {}

  // Leaves the result for the WhereNode, too.
  bool run(Context& c) const override;

 private:
  const fb::SdpaParams& node_;
  const fb::Tid* otherwise_; // what the WhereNode takes for queries that see no key
  uint32_t held_;
};

// Belongs to the WhereNode.
class SeenAttention : public FusedInstruction {
 public:
  SeenAttention(const fb::Tid* out, uint32_t held) : out_(out), held_(held) {}

  bool run(Context& c) const override;

 private:
  const fb::Tid* out_;
  uint32_t held_;
};

} // namespace executorch_mlx
