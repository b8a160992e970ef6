// How a program depends on the position of its token. The host reads the position to find the place of the token in the
// KV caches. If it has no other influence on the graph of a call, the calls of two tokens differ only in the work of
// the kernels of attention.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "call/state.h"
#include "program/program.h"
#include "span.h"

namespace executorch_mlx {

struct PositionUse {
  uint32_t input; // the slot of the position
  // All instructions that compute value slots from inputs, in order, and the tensors on the host that these need.
  std::vector<const DecodedInstruction*> arithmetic;
  // Of the operands of attention and of the updates of KV caches: their bounds.
  std::vector<const fb::IntOrVid*> starts, stops, places;

  // The place of the token, if all bounds agree on it. `values` are those of a call at `position`.
  std::optional<TokenPlace> place(int64_t position, const std::vector<Value>& values) const;
};

// nullopt if the program has another form: in its main chain, the values that depend on the elements of inputs are only
// the places of updates of KV caches and the bounds of the slices of these that attention reads.
std::optional<PositionUse> find_position_use(const MlxProgram& program);

} // namespace executorch_mlx
