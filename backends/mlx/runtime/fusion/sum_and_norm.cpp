#include "fusion/sum_and_norm.h"

#include <memory>

#include "call/context.h"
#include "fusion/patterns.h"
#include "gpu/fused.h"

namespace executorch_mlx {

bool SumAndNorm::run(Context& c) const {
  const auto a = c.take_held(operands_), b = c.take_held(operands_ + 1);
  if (!a || !b) {
    return false;
  }
  const auto both = gpu::add_rms_norm(*a, *b, c.in(norm_.weight()), norm_.eps(), c.stream);
  if (both) {
    c.replace_temporary(norm_.x(), both->first); // so that MLX need not compute the sum again for a later op
    c.set(norm_.out(), both->second);
  }
  return both.has_value();
}

void find_sums_and_norms(MlxProgram& program, const Dataflow& flow) {
  for (size_t chain = 0; chain < program.chains.size(); ++chain) {
    auto& instructions = program.chains[chain].instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      const auto* n = instructions[i].source->op_as_RMSNormNode();
      const size_t writer = n == nullptr || n->weight() == nullptr ? Dataflow::kNone : flow.writer(chain, i, n->x());
      if (writer == Dataflow::kNone) {
        continue;
      }
      if (const auto* sum = instructions[writer].source->op_as_AddNode()) {
        const uint32_t operands = hold_operands(program, instructions[writer], {sum->a(), sum->b()});
        instructions[i].fused = std::make_unique<SumAndNorm>(*n, operands);
      }
    }
  }
}

} // namespace executorch_mlx
