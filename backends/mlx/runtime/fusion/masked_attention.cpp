#include "fusion/masked_attention.h"

#include <memory>

#include "call/context.h"
#include "fusion/patterns.h"
#include "ops/attention.h"

namespace executorch_mlx {

namespace {

// Whether an instruction computes any(mask, -1) with the axis kept. `mask` is the number of a value.
bool is_any_of(const MlxProgram& program, const Dataflow& flow, size_t chain, size_t i, uint32_t mask) {
  const auto* n = i == Dataflow::kNone ? nullptr : program.chains[chain].instructions[i].source->op_as_AnyNode();
  return n != nullptr && n->keepdims() && n->axes() != nullptr && n->axes()->size() == 1 && n->axes()->Get(0) == -1 &&
      flow.read(chain, i, n->x()) == mask;
}

} // namespace

bool MaskedAttention::run(Context& c) const try {
  c.release(held_);
  const auto& zero = c.slot(otherwise_);
  if (!zero || zero->ndim() > 4 || !is_float_zero(*zero) || !c.slot(node_.q()) ||
      c.in(node_.q()).dtype() != mx::float32) {
    return false;
  }
  const auto y = attention_or_zeros(node_, c);
  if (y) {
    c.set(node_.out(), *y);
    c.hold(held_, *y);
  }
  return y.has_value();
} catch (const Failure&) {
  return false; // the instruction with the invalid operand will fail
}

bool SeenAttention::run(Context& c) const {
  auto y = c.take_held(held_);
  if (y) {
    c.set(out_, std::move(*y));
  }
  return y.has_value();
}

void find_masked_attentions(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    auto& instructions = program.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      const auto* n = instructions[i].source->op_as_WhereNode();
      const size_t writer = n == nullptr ? Dataflow::kNone : flow.writer(chain, i, n->x());
      const auto* attention = writer == Dataflow::kNone ? nullptr : instructions[writer].source->op_as_SdpaNode();
      if (attention == nullptr || attention->mask() == nullptr || n->y()->idx() >= program.layout.constants) {
        continue;
      }
      const auto& result = flow.value(flow.read(chain, i, n->x()));
      const bool is_only_read_here = result.reads == 1 && !flow.escapes(result);
      const uint32_t mask = flow.read(chain, writer, attention->mask());
      if (is_only_read_here && is_any_of(program, flow, chain, flow.writer(chain, i, n->condition()), mask)) {
        const uint32_t held = program.layout.add_held();
        instructions[writer].fused = std::make_unique<MaskedAttention>(*attention, n->y(), held);
        instructions[i].fused = std::make_unique<SeenAttention>(n->out(), held);
      }
    }
  }
}

} // namespace executorch_mlx
