#include "fusion/fuse.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "ops/cpu/cpu_kernels.h"
#include "fusion/patterns.h"
#include "gpu/verdicts.h"
#include "mlx_internals/cuda.h"

namespace executorch_mlx {

namespace {

// Programs with more instructions and list elements run without fused instructions, which bounds the memory that the
// pass takes. Real programs have far fewer.
constexpr uint64_t kMaxSize = 1 << 20;

constexpr Pattern kCpuPatterns[] = {find_constant_results, find_constant_matrices, find_elementwise_groups,
    find_product_epilogues, find_product_groups, find_masked_attentions, find_recurrent_loops};

// A pattern of a GPU, and the kernels for which it finds instructions: it needs one of them.
struct GpuPattern {
  Pattern find;
  std::vector<gpu::Kernel> kernels;
};

std::vector<GpuPattern> gpu_patterns() {
  using gpu::Kernel;
  return {{find_constant_matrices, {Kernel::products}},
      {find_products_and_sums, {Kernel::products, Kernel::quantized_products}},
      {find_silu_products, {Kernel::silu_product, Kernel::products, Kernel::quantized_products}},
      {find_product_groups, {Kernel::products, Kernel::quantized_products}},
      {find_sums_and_norms, {Kernel::add_rms_norm}}, {find_ropes, {Kernel::norm_rope}},
      {find_quantized_embeddings, {Kernel::embedding}}};
}

std::vector<Pattern> patterns_for(mx::Device device) {
  const mx::Stream stream(0, device); // of which the functions look at the device only
  if (cpu::computes_at_once(stream)) {
    return {std::begin(kCpuPatterns), std::end(kCpuPatterns)};
  }
  std::vector<Pattern> patterns{find_constant_results};
  for (const auto& [find, kernels] : gpu_patterns()) {
    if (std::any_of(kernels.begin(), kernels.end(), [&](auto kernel) { return gpu::is_used(kernel, stream); })) {
      patterns.push_back(find);
    }
  }
  if (gpu::is_cuda(stream)) {
    patterns.push_back(find_added_products); // after the patterns that compute products in other ways
  }
  return patterns;
}

uint64_t size_of(const MlxProgram& program) {
  uint64_t size = 0;
  for (const auto& chain : program.chains) {
    for (const auto& instruction : chain.instructions) {
      size += 1 + instruction.list_elements;
    }
  }
  return size;
}

} // namespace

uint32_t hold_operands(
    MlxProgram& program, DecodedInstruction& instruction, std::vector<const fb::Tid*> slots, int64_t max_rows) {
  if (instruction.operands == nullptr) {
    const uint32_t first = program.layout.add_held(slots.size());
    instruction.operands = std::make_unique<HeldOperands>(HeldOperands{first, std::move(slots), max_rows});
  }
  return instruction.operands->first;
}

// The transpose of a constant: a view, which is the same in every call.
void find_constant_results(MlxProgram& program, const Dataflow&) {
  for (auto& chain : program.chains) {
    for (auto& instruction : chain.instructions) {
      const auto* n = instruction.source->op_as_TransposeNode();
      if (n != nullptr && n->x()->idx() < program.layout.constants) {
        instruction.kept = program.layout.add_kept();
      }
    }
  }
}

void fuse(MlxProgram& program) {
  program.only_in_products.assign(program.layout.constants, false);
  if (size_of(program) > kMaxSize) {
    return;
  }
  const Dataflow flow(program);
  for (const Pattern find : patterns_for(program.device)) {
    find(program, flow);
  }
  find_last_reads(program, flow);
}

} // namespace executorch_mlx
