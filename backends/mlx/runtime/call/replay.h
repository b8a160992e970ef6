// Calls on an NVIDIA GPU whose kernels run again, without the graph that the host builds for a call. A call for one
// token of each row is a step; any other is one for tokens of a prompt.
#pragma once

#include <mlx/mlx.h>

#include <memory>
#include <utility>

#include "call/context.h"
#include "call/prompt_replay.h"
#include "call/replayed_part.h"
#include "call/state.h"
#include "call/step_replay.h"
#include "program/program.h"

namespace executorch_mlx {

namespace mx = mlx::core;

class Replay {
 public:
  // Null if no call of the program can be replayed on the stream.
  static std::unique_ptr<Replay> make(const MlxProgram& program, mx::Stream stream);

  Replay(ReplayedPart part, mx::Stream stream)
      : part_(std::move(part)), stream_(stream), steps_(part_, stream), prompts_(part_, stream) {}
  Replay(const Replay&) = delete;

  // Runs the first instructions of the main chain, if the call can be replayed now or later, and returns their number.
  // `state` has the inputs of the call. The host must not read the memory of the results.
  size_t run(State& state, Context& context);

 private:
  const ReplayedPart part_;
  const mx::Stream stream_;
  StepReplay steps_;
  PromptReplay prompts_;
};

} // namespace executorch_mlx
