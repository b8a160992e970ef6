// Calls for one token on an NVIDIA GPU whose kernels run again, without the graph that the host builds for a call.
//
// If all results of a call come from one sequence of kernels, the next call for one token needs the same kernels, with
// other addresses of inputs and outputs, and another position in the kernels of attention. PositionUse says that
// nothing else can differ. The host then only changes these arguments in a CUDA graph, and launches it.
//
// A replay proves itself as kernels do: the first call that could be one runs both ways. If a result of a kernel
// differs in a bit, or the replay takes longer, there are no replays of the program.
#pragma once

#include <mlx/mlx.h>

#include <chrono>
#include <memory>
#include <optional>
#include <vector>

#include "call/position.h"
#include "call/state.h"
#include "gpu/sequence_kernel.h"
#include "mlx_internals/cuda.h"
#include "options.h"
#include "program/program.h"

namespace executorch_mlx {

namespace mx = mlx::core;

class Replay {
 public:
  // Null if no call of the program can be replayed on the stream.
  static std::unique_ptr<Replay> make(const MlxProgram& program, mx::Stream stream);

  Replay(const MlxProgram& program, PositionUse use, uint32_t tokens, mx::Stream stream);

  // Whether a call has been recorded.
  bool is_ready() const { return plan_.has_value(); }

  // Whether the call can be a replay. `state` has its inputs. Changes the value slots.
  bool prepare(State& state, const Limits& limits);

  // Whether the replay has been found right and not slower. If not, try_out() runs it, and the call must also be run
  // and recorded.
  bool is_proven() const { return is_proven_; }
  void try_out(const State& state);

  // The arrays of the outputs, by slot, that start() computes. It returns before they are computed.
  std::vector<std::pair<uint32_t, mx::array>> outputs();
  void start();

  // Before and after the evaluation of a call that is no replay, for later ones. `results` are all arrays that it
  // evaluates. finish() throws nothing.
  void record(const State& state, const std::vector<mx::array>& results);
  void finish(const State& state);

 private:
  struct Argument {
    size_t kernel, number;
  };

  struct Tensor { // an input or output
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

  // What a recorded call is made of.
  struct Plan {
    std::vector<gpu::KernelRun> runs; // of the present call, after prepare()
    std::vector<Tensor> inputs, outputs;
    std::vector<Attention> attention;
    std::vector<const void*> buffers; // the address of each
    int capacity; // of the KV caches
    std::vector<Value> values;
    std::vector<mx::array> kept; // arrays whose memory the kernels use
    mx::array memory;
    std::vector<std::pair<size_t, size_t>> results; // in the memory, those that another kernel reads
    std::unique_ptr<gpu::KernelReplay> graph;
  };

  // A call that is being recorded.
  struct Recorded {
    std::shared_ptr<gpu::SequenceKernel::Recording> sequence;
    std::vector<std::pair<uint32_t, mx::array>> inputs, outputs;
    std::vector<Value> values;
    int64_t position;
  };

  std::optional<Plan> plan_of(const State& state, const Recorded& recorded) const;
  std::optional<TokenPlace> place_of(State& state, const Limits& limits) const;
  void judge(const Plan& ordinary, const State& state);
  void give_up(const std::string& reason);

  const MlxProgram& program_;
  const PositionUse use_;
  const uint32_t tokens_; // the slot of the input
  const mx::Stream stream_;
  int attempts_ = 0; // to record a call
  bool is_proven_ = false, is_given_up_ = false;
  std::optional<Recorded> recorded_;
  std::optional<Plan> plan_;
  std::vector<mx::array> in_use_; // by the present call

  // Of the trial.
  std::optional<mx::array> results_;
  std::chrono::steady_clock::time_point begin_;
  double seconds_ = 0;
};

} // namespace executorch_mlx
