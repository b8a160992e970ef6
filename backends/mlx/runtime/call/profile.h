// Times every instruction and reports the times to ExecuTorch's event tracer.
#pragma once

#include <cstdint>
#include <unordered_map>

#include "call/state.h"
#include "program/program.h"

namespace executorch::runtime {
class EventTracer;
}

namespace executorch_mlx {

// MLX arrays are lazy. A profiled call evaluates the results of each instruction before the next one
// starts, so that the measured time is the time of this instruction alone. A profiled call gives the
// same results as a plain one. It is slower, because MLX can neither fuse instructions nor run them in
// parallel.
class Profiler {
 public:
  Profiler(const MlxProgram& program, State& state, executorch::runtime::EventTracer& tracer)
      : program_(program), state_(state), tracer_(tracer) {}

  // Runs the instruction `instruction_index` of the chain `chain_index`, evaluates its results, and reports the time.
  void run(Context& context, uint32_t chain_index, size_t instruction_index);

 private:
  const MlxProgram& program_;
  State& state_;
  executorch::runtime::EventTracer& tracer_;
  std::unordered_map<const void*, uint32_t> runs_; // how often each instruction has run in this call
};

} // namespace executorch_mlx
