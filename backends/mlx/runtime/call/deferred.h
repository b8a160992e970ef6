// Calls that return before their results are computed: see executorch_mlx/deferred.h.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "call/call_io.h"
#include "error.h"
#include "program/program.h"
#include "call/shared.h"

namespace executorch_mlx {

namespace mx = mlx::core;

// A call whose work has been submitted to the device.
class DeferredCall {
 public:
  // `outputs` are what collect_outputs() returned, `copies` copies of them, and `failures` is Owner::failures before
  // the call. `program` must outlive this object.
  DeferredCall(const MlxProgram& program, std::shared_ptr<Session> session, Arguments args,
      std::vector<mx::array> outputs, std::vector<mx::array> copies, mx::Stream stream, uint64_t failures);
  DeferredCall(const DeferredCall&) = delete;
  ~DeferredCall();

  // Waits for the results and writes them to the ExecuTorch tensors of the outputs. If a result cannot be computed,
  // throws, and the mutable buffers are undefined unless they have been reset since the call.
  void finish();

  // Whether the mutable buffers of the program are undefined now.
  bool is_undefined() const { return session_->is_undefined; }

  // The result for the output whose ExecuTorch tensor has this memory. It may not be computed yet. Throws Failure if no
  // output has this memory.
  const mx::array& output(const void* memory) const;

 private:
  void wait();

  const MlxProgram& program_;
  std::shared_ptr<Session> session_;
  std::vector<EValue*> args_;
  // A later call on the device reads `outputs_`, and the host reads `copies_`. If the host read `outputs_`, MLX would
  // move their memory away from the device.
  std::vector<mx::array> outputs_;
  std::vector<mx::array> copies_;
  mx::Stream stream_;
  uint64_t failures_;
  uint64_t resets_; // Session::resets before the call
};

// What executorch_mlx_defer() asks of the next call: where its tokens come from.
struct Deferral {
  Error error = Error::Ok; // of executorch_mlx_defer(): the next call fails with it
  const DeferredCall* source = nullptr; // null: from the input of the call
  const void* output = nullptr; // the memory of the output of `source` that has the tokens
  std::vector<int64_t> elements; // token i is element elements[i] of this output
};

// Returns what the last executorch_mlx_defer() asks of this call. Returns nullopt if this call is not to be deferred.
std::optional<Deferral> take_deferral();

// Keeps the call until executorch_mlx_deferred_take() takes it.
void set_deferred(std::unique_ptr<DeferredCall> call);

// Sets `tokens` to the elements that the deferral names. The shape of `tokens` stays.
void set_tokens(const Deferral& deferral, mx::array& tokens, mx::Stream stream);

// Copies of arrays in memory of their own, not evaluated.
std::vector<mx::array> copies_of(const std::vector<mx::array>& arrays, mx::Stream stream);

} // namespace executorch_mlx
