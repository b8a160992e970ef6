// Steps on an NVIDIA GPU whose kernels run again, without the graph that the host builds for a call.
//
// A step is a call for one token, or for one of each row. If all results of the first instructions of its main chain
// come from one sequence of kernels, the next step needs the same kernels, with other addresses of inputs and outputs,
// and other positions in the kernels of attention. PositionUse says that nothing else can differ. The host then only
// changes these arguments in a CUDA graph, and launches it. The other instructions of the main chain run as usual: all
// that the host reads to choose among branches is there.
//
// A replay proves itself as kernels do: the first step that could be one runs both ways. If a result of a kernel
// differs in a bit, or the replay takes longer, there are no replays of the program.
#pragma once

#include <mlx/mlx.h>

#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "call/context.h"
#include "call/replayed_part.h"
#include "call/state.h"
#include "gpu/sequence_kernel.h"
#include "mlx_internals/cuda.h"

namespace executorch_mlx {

namespace mx = mlx::core;

class StepReplay {
 public:
  // `part` exists as long as this object.
  StepReplay(const ReplayedPart& part, mx::Stream stream) : part_(part), stream_(stream) {}

  // Runs the instructions of the part for a step, or returns 0. Returns their number.
  size_t run(State& state, Context& context);

 private:
  struct Argument {
    size_t kernel, number;
  };

  struct Tensor { // an input, or a result that later instructions or the caller read
    uint32_t slot;
    mx::Shape shape;
    mx::Dtype dtype;
    std::vector<Argument> arguments; // its addresses
  };

  struct Attention {
    size_t kernel;
    int ahead; // blocks that load what follows
    size_t first_number; // of the arguments
    gpu::SequenceKernel::Call call;
  };

  // What a recorded step is made of.
  struct Plan {
    std::vector<gpu::KernelRun> runs; // of the present step, after prepare()
    std::vector<Tensor> inputs, results;
    std::vector<Attention> attention;
    std::vector<const void*> caches; // the address of each
    int capacity; // of the KV caches
    std::vector<Value> values;
    std::vector<mx::array> kept; // arrays whose memory the kernels use
    mx::array memory;
    std::vector<std::pair<size_t, size_t>> compared; // in the memory: results that another kernel or instruction reads
    std::unique_ptr<gpu::KernelReplay> graph;
  };

  // Whether the step can be a replay. Changes the value slots.
  bool prepare(State& state, Context& context);
  std::optional<std::vector<TokenPlace>> places(State& state, Context& context) const;
  void start(State& state);

  class Planner;

  // Runs the step in the usual way.
  void record(State& state, Context& context);

  // The trial: runs the replay, and compares it with the same step in the usual way.
  void try_out(State& state);
  void judge(const Plan& usual, double seconds);
  void give_up(const std::string& reason);

  const ReplayedPart& part_;
  const mx::Stream stream_;
  int attempts_ = 0; // to record a step
  bool is_proven_ = false, is_given_up_ = false;
  std::optional<Plan> plan_;
  std::vector<mx::array> in_use_; // by the present step

  // Of the trial.
  std::optional<mx::array> tried_; // what the kernels of the replay have written
  double seconds_ = 0;
};

} // namespace executorch_mlx
