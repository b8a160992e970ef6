// How a program depends on the position of its token. The host reads the position to find the place of the token in the
// KV caches. If it has no other influence on the graph of a call, the calls of two tokens differ only in the work of
// the kernels of attention.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "program/program.h"

namespace executorch_mlx {

struct PositionUse {
  uint32_t input; // the slot of the position
  std::vector<const DecodedInstruction*> arithmetic; // all that compute value slots from the position, in order
  std::vector<uint32_t> starts; // value slots that must be the position
  std::vector<uint32_t> stops; // value slots that must be the position + 1
};

// nullopt if the program has another form: in its main chain, the values that depend on the position are only the
// places of updates of KV caches and the ends of the slices of these that attention reads, and no other element of an
// input is read by the host.
std::optional<PositionUse> find_position_use(const MlxProgram& program);

} // namespace executorch_mlx
