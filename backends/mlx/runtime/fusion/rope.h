// Rotary position embeddings, which a kernel for NVIDIA GPUs computes with the RMSNorm and the transposition before
// them. Two consecutive RopeNodes with the same positions and frequencies are computed together: those of the query and
// the key of a layer.
#pragma once

#include <utility>
#include <vector>

#include "program/program.h"
#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

class RopeGroup : public FusedInstruction {
 public:
  explicit RopeGroup(std::vector<const fb::RopeParams*> nodes)
      : FusedInstruction(static_cast<uint32_t>(nodes.size())), nodes_(std::move(nodes)) {}

  bool run(Context& c) const override;

 private:
  std::vector<const fb::RopeParams*> nodes_; // one or two
};

} // namespace executorch_mlx
