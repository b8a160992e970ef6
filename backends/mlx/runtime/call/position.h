// How a program depends on the positions of its tokens, one of each row. The host reads them to find the place of each
// token in the KV caches. As long as they have no other influence on the graph of a call, the calls of two tokens
// differ only in the work of the kernels of attention.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "call/state.h"
#include "program/program.h"
#include "span.h"

namespace executorch_mlx {

// Of the first instructions of the main chain.
struct PositionUse {
  uint32_t input; // the slot of the positions
  size_t end; // the number of these instructions
  // Those that compute value slots from inputs, in order, and the tensors on the host that these need.
  std::vector<const DecodedInstruction*> arithmetic;
  std::vector<uint32_t> read; // the slots of the inputs whose elements the host reads
  std::vector<uint32_t> caches; // the slots of the KV caches that they update

  // Of each row, and the operands of attention and of the updates of KV caches: their bounds.
  struct Row {
    std::vector<const fb::IntOrVid*> starts, stops, places;
  };
  std::vector<Row> rows;

  // The place of the token of each row, if all bounds agree on it. `values` are those of a call at `positions`.
  std::optional<std::vector<TokenPlace>> places(
      std::span<const int64_t> positions, const std::vector<Value>& values) const;
};

// The longest beginning of the main chain in which the values that depend on the elements of inputs are only the places
// of updates of KV caches and the bounds of the positions that attention reads. nullopt if it has no attention.
std::optional<PositionUse> find_position_use(const MlxProgram& program);

} // namespace executorch_mlx
