// The dispatch table: from an IR node to the function that runs it.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>

#include "program/program.h"

namespace executorch_mlx {

// An op row: one entry of the dispatch table. The macro MLX_ROW in ops/op_row.h creates it. `function` is null for a
// node of earlier versions, which is not supported any more.
struct OpRow {
  fb::OpNode op;
  const char* name;
  OpFunction function;
};

// Returns the op row of the IR node with this tag in the union OpNode, or nullptr if there is none.
const OpRow* find_row(size_t tag);

// The number of ops in the schema. EnumValuesOpNode() also lists NONE, which is not an op.
constexpr size_t kNumOps = std::extent_v<std::remove_reference_t<decltype(fb::EnumValuesOpNode())>> - 1;

// The op rows, indexed by tag. If no op has a tag, the `name` of its entry is null.
using DispatchTable = std::array<OpRow, static_cast<size_t>(fb::OpNode::MAX) + 1>;

// How many of `rows` have this tag.
constexpr size_t count_rows(const auto& rows, size_t tag) {
  size_t count = 0;
  for (const OpRow& row : rows) {
    count += row.op == static_cast<fb::OpNode>(tag);
  }
  return count;
}

// The first op that has more than one op row in all families together, or NONE.
template <const auto&... Families>
consteval fb::OpNode find_duplicate() {
  for (size_t tag = 0; tag < std::tuple_size_v<DispatchTable>; ++tag) {
    if ((count_rows(Families, tag) + ...) > 1) {
      return static_cast<fb::OpNode>(tag);
    }
  }
  return fb::OpNode::NONE;
}

// reject_duplicate() and reject_missing() are templates so that the compiler's message shows their arguments: the
// duplicate op, or the numbers of op rows and of ops.
template <fb::OpNode Duplicate>
consteval void reject_duplicate() {
  static_assert(Duplicate == fb::OpNode::NONE, "an op has two rows in the dispatch table");
}

template <size_t Rows, size_t Ops>
consteval void reject_missing() {
  static_assert(Rows >= Ops, "an op of the schema has no row in the dispatch table");
}

// Joins arrays of op rows into the dispatch table. Compiles only if every op of the schema has exactly one op row.
template <const auto&... Families>
consteval DispatchTable make_table() {
  reject_duplicate<find_duplicate<Families...>()>();
  reject_missing<(std::size(Families) + ...), kNumOps>();
  DispatchTable table{};
  const auto place = [&](const auto& rows) {
    for (const OpRow& row : rows) {
      table[static_cast<size_t>(row.op)] = row;
    }
  };
  (place(Families), ...);
  return table;
}

} // namespace executorch_mlx
