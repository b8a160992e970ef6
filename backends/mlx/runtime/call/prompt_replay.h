// Calls for tokens of a prompt on an NVIDIA GPU that run again.
//
// MLX computes most of such a call. In a small model, the host needs longer to build and submit MLX's graph than the
// GPU to compute it. If the shapes of the inputs and all elements that the host reads are those of an earlier call, as
// are the positions and the row of the KV caches, then the graph is the same too, and only elements that the GPU reads
// differ. The second such call is therefore recorded: the CUDA graph that MLX has made is kept, with the memory of all
// its arrays. The third one proves it, and from then on the host only copies the inputs to the memory of the recorded
// call, launches the graph, and copies the results.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "call/context.h"
#include "call/replayed_part.h"
#include "call/state.h"
#include "mlx_internals/cuda.h"

namespace executorch_mlx {

namespace mx = mlx::core;

class PromptReplay {
 public:
  // `part` exists as long as this object.
  PromptReplay(const ReplayedPart& part, mx::Stream stream) : part_(part), stream_(stream) {}

  // Runs the instructions of the part, or returns 0. Returns their number.
  size_t run(State& state, Context& context);

 private:
  using Slots = ReplayedPart::Slots;

  // An earlier call.
  struct Call {
    std::vector<mx::Shape> shapes; // of the inputs
    std::vector<int64_t> numbers; // the elements of inputs that the host reads
    std::vector<Value> values; // the value slots
    // What a recorded call has used. Its inputs and results are in memory of their own.
    std::unique_ptr<gpu::WorkReplay> work = nullptr;
    Slots inputs = {}, results = {};
    std::vector<const void*> caches = {}, buffers = {}; // the address of each
    int failures = 0; // to record it, or because buffers have moved since then
    bool is_proven = false;
  };

  // The earlier call that this one repeats, or null. Sets the value slots if there is one.
  Call* find(State& state, Context& context);
  void remember(State& state);

  bool finds_memory(const Call& call, State& state) const;

  // Runs the call in the usual way.
  void record(Call& call, Slots inputs, State& state, Context& context);
  // Runs the call both ways, and compares the results and what has been written to the KV caches.
  void try_out(Call& call, const Slots& inputs, State& state, Context& context);
  size_t bytes() const; // of all recordings
  // Drops the recording, and waits until it no longer runs.
  void drop(Call& call, State& state);
  void count_failure(Call& call, const std::string& reason);
  void refuse(Call& call, State& state, const std::string& reason);

  std::vector<int64_t> numbers(const State& state) const;
  Slots inputs(const State& state) const;
  // Starts the work of a recorded call with these inputs.
  void start(const Call& call, const Slots& inputs, State& state);
  // Copies the results of a recorded call to the slots. Calls before() first.
  void take_results(const Call& call, State& state, const std::function<void()>& before = nullptr);

  const ReplayedPart& part_;
  const mx::Stream stream_;
  std::list<Call> calls_; // the latest one first
};

} // namespace executorch_mlx
