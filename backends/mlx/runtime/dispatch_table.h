// The dispatch table: from an IR node to the function that runs it.
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>

#include "program.h"

namespace executorch_mlx {

// The macro MLX_ROW in ops/row.h makes one.
struct OpRow {
  fb::OpNode op;
  const char* name;
  Handler handler;
};

// Returns nullptr if the runtime has no op with this tag.
const OpRow* find_row(size_t tag);

// The ops of the schema, whose list includes NONE.
constexpr size_t kNumOps = std::extent_v<std::remove_reference_t<decltype(fb::EnumValuesOpNode())>> - 1;

// Indexed by tag. A tag without an op has a null handler.
using DispatchTable = std::array<OpRow, static_cast<size_t>(fb::OpNode::MAX) + 1>;

constexpr size_t count_rows(const auto& rows, size_t tag) {
  size_t count = 0;
  for (const OpRow& row : rows) {
    count += row.op == static_cast<fb::OpNode>(tag);
  }
  return count;
}

// The first op with more than one row, or NONE.
template <const auto&... Families>
consteval fb::OpNode find_duplicate() {
  for (size_t tag = 0; tag < std::tuple_size_v<DispatchTable>; ++tag) {
    if ((count_rows(Families, tag) + ...) > 1) {
      return static_cast<fb::OpNode>(tag);
    }
  }
  return fb::OpNode::NONE;
}

// Templates, so that the compiler prints the op or the numbers with the message.
template <fb::OpNode Duplicate>
consteval void reject_duplicate() {
  static_assert(Duplicate == fb::OpNode::NONE, "an op has two rows in the dispatch table");
}

template <size_t Rows, size_t Ops>
consteval void reject_missing() {
  static_assert(Rows >= Ops, "an op of the schema has no row in the dispatch table");
}

// Joins arrays of op rows. Compiles only if every op of the schema has exactly one row.
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
