#include "fusion/rope.h"

#include <memory>

#include "fusion/patterns.h"
#include "gpu/fused.h"
#include "ops/attention.h"

namespace executorch_mlx {

namespace {

bool have_same_options(const fb::RopeParams& a, const fb::RopeParams& b) {
  return !a.traditional() && !b.traditional() && a.dims() == b.dims() && a.base() == b.base() && a.scale() == b.scale();
}

bool have_same_positions(const fb::RopeParams& a, const fb::RopeParams& b) {
  return a.freqs() != nullptr && b.freqs() != nullptr && !a.offset()->is_vid() && !b.offset()->is_vid() &&
      a.freqs()->idx() == b.freqs()->idx() && a.offset()->tid()->idx() == b.offset()->tid()->idx();
}

// Whether the first of two nodes writes an operand of the second one.
bool feeds(const fb::RopeParams& a, const fb::RopeParams& b) {
  const uint32_t out = a.out()->idx();
  return out == b.x()->idx() || out == b.freqs()->idx() || out == b.offset()->tid()->idx();
}

} // namespace

bool RopeGroup::run(Context& c) const {
  const auto& n = *nodes_[0];
  const auto [x, offset, freqs] = rope_operands(n, c);
  if (n.dims() != x.shape(-1)) {
    return false;
  }
  std::vector<mx::array> arrays{x};
  if (nodes_.size() > 1) {
    arrays.push_back(rope_operands(*nodes_[1], c).x);
  }
  const auto results = gpu::norm_rope(arrays, n.scale(), offset, *freqs, c.stream);
  for (size_t i = 0; results && i < nodes_.size(); ++i) {
    c.set(nodes_[i]->out(), (*results)[i]);
  }
  return results.has_value();
}

void find_ropes(MlxProgram& program, const Dataflow&) {
  for (auto& chain : program.chains) {
    auto& instructions = chain.instructions;
    for (size_t i = 0; i < instructions.size(); ++i) {
      const auto* n = instructions[i].source->op_as_RopeNode();
      if (n == nullptr || n->traditional() || n->freqs() == nullptr) {
        continue;
      }
      std::vector<const fb::RopeParams*> nodes{n};
      const auto* next = i + 1 < instructions.size() ? instructions[i + 1].source->op_as_RopeNode() : nullptr;
      if (next != nullptr && have_same_options(*n, *next) && have_same_positions(*n, *next) && !feeds(*n, *next)) {
        nodes.push_back(next);
      }
      instructions[i].fused = std::make_unique<RopeGroup>(std::move(nodes));
      i += instructions[i].fused->length - 1;
    }
  }
}

} // namespace executorch_mlx
