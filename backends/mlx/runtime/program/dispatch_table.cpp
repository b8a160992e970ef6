#include "program/dispatch_table.h"

#include <op_list.h>

#include <array>
#include <iterator>
#include <type_traits>

namespace executorch_mlx {

#define MLX_DECLARE(Op) void run_##Op(const void* node, Context& context);
EXECUTORCH_MLX_OPS(MLX_DECLARE)

void run_AllGatherNode(const void*, Context&) {}
void run_AllSumNode(const void*, Context&) {}

bool is_retired(fb::OpNode op) { return op == fb::OpNode::AllGatherNode || op == fb::OpNode::AllSumNode; }

namespace {

#define MLX_ROW(Op) OpRow{fb::OpNode::Op, #Op, run_##Op},
constexpr OpRow kRows[] = {EXECUTORCH_MLX_OPS(MLX_ROW)};

// EnumValuesOpNode() also lists NONE, which is not an op.
constexpr size_t kNumOps = std::extent_v<std::remove_reference_t<decltype(fb::EnumValuesOpNode())>> - 1;
static_assert(std::size(kRows) == kNumOps, "op_list.h does not list every op of the schema");

// The rows by tag. If no op has a tag, the name is null.
constexpr auto kTable = [] {
  std::array<OpRow, static_cast<size_t>(fb::OpNode::MAX) + 1> table{};
  for (const OpRow& row : kRows) {
    table[static_cast<size_t>(row.op)] = row;
  }
  return table;
}();

} // namespace

const OpRow* find_row(size_t tag) {
  return tag < kTable.size() && kTable[tag].name != nullptr ? &kTable[tag] : nullptr;
}

} // namespace executorch_mlx
