// Times every instruction and reports it to ExecuTorch's event tracer.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "program.h"
#include "state.h"

namespace executorch::runtime {
class EventTracer;
}

namespace executorch_mlx {

// MLX arrays are lazy. A profiled call evaluates each instruction before the next one starts, so
// that the time belongs to the instruction. It is slower than a plain call, because MLX can neither
// fuse instructions nor run them in parallel, and gives the same results.
class Profiler {
 public:
  Profiler(const Program& program, State& state, executorch::runtime::EventTracer& tracer)
      : program_(program), state_(state), tracer_(tracer) {}

  // Runs, evaluates and logs one instruction of a chain.
  void run(Context& context, uint32_t chain, size_t instruction);

 private:
  const Program& program_;
  State& state_;
  executorch::runtime::EventTracer& tracer_;
  std::unordered_map<const void*, uint32_t> runs_;  // of each instruction in this call
};

} // namespace executorch_mlx
