#include "program/dispatch_table.h"

#include "ops/attention.h"
#include "ops/control.h"
#include "ops/conv.h"
#include "ops/create.h"
#include "ops/elementwise.h"
#include "ops/index.h"
#include "ops/linalg.h"
#include "ops/norm.h"
#include "ops/quant.h"
#include "ops/quantized_cache.h"
#include "ops/random.h"
#include "ops/recurrence.h"
#include "ops/reduce.h"
#include "ops/scalar.h"
#include "ops/shape.h"

namespace executorch_mlx {

namespace {

// Nodes of earlier versions. The program is refused before any of them could run.
constexpr OpRow kRetiredRows[] = {
    {fb::OpNode::AllGatherNode, "AllGatherNode", nullptr},
    {fb::OpNode::AllSumNode, "AllSumNode", nullptr},
};

constexpr DispatchTable kTable = make_table<kAttentionRows, kControlRows, kConvRows, kCreateRows, kElementwiseRows,
    kIndexRows, kLinalgRows, kNormRows, kQuantRows, kQuantizedCacheRows, kRandomRows, kRecurrenceRows, kReduceRows,
    kRetiredRows, kScalarRows, kShapeRows>();

} // namespace

const OpRow* find_row(size_t tag) {
  return tag < kTable.size() && kTable[tag].name != nullptr ? &kTable[tag] : nullptr;
}

} // namespace executorch_mlx
