// The operands of a loop over the slices of arrays.
#pragma once

#include <vector>

#include "call/context.h"

namespace executorch_mlx {

// The checked operands of a ScanNode.
struct ScanOperands {
  std::vector<mx::array> originals;
  int axis;
  int iterations;
};

ScanOperands scan_operands(const fb::ScanParams& n, Context& c);

} // namespace executorch_mlx
