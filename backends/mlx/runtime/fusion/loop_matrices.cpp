// Matrices that every iteration of a loop multiplies by, and none changes. A loop with many iterations packs such a
// matrix at its first use: see Context::packed().
#include <map>
#include <set>

#include "fusion/patterns.h"
#include "program/tensor_slots.h"

namespace executorch_mlx {

namespace {

using Slots = std::set<uint32_t>;

// The slots that an iteration of a loop writes, or nullopt if it runs other chains, which may write any slot.
std::optional<Slots> written_slots(const fb::ScanParams& n, const Chain& body) {
  Slots written;
  for (const auto* slots : {n.sliced(), n.outputs(), n.carry()}) {
    for (const auto* slot : *slots) {
      written.insert(slot->idx());
    }
  }
  for (const auto& decoded : body.instructions) {
    if (is_control(*decoded.source)) {
      return std::nullopt;
    }
    for_each_tensor_slot(*decoded.source, [&](const fb::Tid& tid, Access access) {
      if (access != Access::read) {
        written.insert(tid.idx());
      }
    });
  }
  return written;
}

} // namespace

void find_loop_matrices(MlxProgram& program, const Dataflow&) {
  std::map<int64_t, std::vector<const fb::ScanParams*>> loops; // by body
  for (const auto& chain : program.chains) {
    for (const auto& instruction : chain.instructions) {
      if (const auto* n = instruction.source->op_as_ScanNode()) {
        loops[n->body_chain_idx()].push_back(n);
      }
    }
  }
  for (const auto& [body, scans] : loops) {
    auto& chain = program.chains[body];
    const auto written = scans.size() == 1 ? written_slots(*scans[0], chain) : std::nullopt;
    chain.loop_matrices_begin = program.loop_matrices;
    std::map<uint32_t, uint32_t> numbers; // by slot
    for (auto& instruction : chain.instructions) {
      const auto* product = instruction.source->op_as_AddmmNode();
      if (product != nullptr && written && !written->contains(product->mat2()->idx())) {
        const auto [found, is_new] = numbers.emplace(product->mat2()->idx(), program.loop_matrices);
        program.loop_matrices += is_new ? 1 : 0;
        instruction.loop_matrix = found->second;
      }
    }
    chain.loop_matrices_end = program.loop_matrices;
  }
}

} // namespace executorch_mlx
