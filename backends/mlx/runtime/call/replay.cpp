#include "call/replay.h"

#include "call/evaluation.h"
#include "gpu/sequence_kernel.h"
#include "gpu/verdicts.h"
#include "memory/limit.h"
#include "mlx_internals/cuda.h"

namespace executorch_mlx {

std::unique_ptr<Replay> Replay::make(const MlxProgram& program, mx::Stream stream) {
  if (!gpu::is_cuda(stream) || !gpu::is_used(gpu::Kernel::replay, stream)) {
    return nullptr;
  }
  auto part = ReplayedPart::find(program);
  return part ? std::make_unique<Replay>(*std::move(part), stream) : nullptr;
}

size_t Replay::run(State& state, Context& context) {
  const size_t rows = part_.use.rows.size();
  const mx::array& tokens = *state.tensors[part_.tokens];
  if (has_memory_limit() || state.tensors[part_.use.input]->size() != rows) {
    return 0;
  }
  if (!gpu::operand_in_memory(tokens)) {
    Evaluation({tokens}, stream_, state.owner).start();
  }
  return tokens.size() == rows ? steps_.run(state, context) : prompts_.run(state, context);
}

} // namespace executorch_mlx
