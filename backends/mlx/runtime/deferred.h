// Calls that return before their results are computed: see executorch_mlx/deferred.h.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "call_io.h"
#include "program.h"
#include "shared.h"
#include "state.h"

namespace executorch_mlx {

namespace mx = mlx::core;

// A call that has been submitted.
class DeferredCall {
 public:
  // `outputs` are what collect_outputs() returned, `copies` copies of them, and `failures` is what failed_evaluations()
  // returned before the call. All references must outlive this object.
  DeferredCall(
      const Program& program, State& state, std::shared_ptr<Session> session, Arguments args,
      std::vector<mx::array> outputs, std::vector<mx::array> copies, mx::Stream stream, uint64_t failures);
  DeferredCall(const DeferredCall&) = delete;
  ~DeferredCall();

  // Waits for the results and writes them to the tensors of the outputs. If they cannot be computed, marks the mutable
  // buffers as lost and throws.
  void finish();

  // The results of the output tensor with this memory. They may not be computed yet. Throws Failure if there is none.
  const mx::array& output(const void* memory) const;

 private:
  void wait();

  const Program& program_;
  State& state_;
  std::shared_ptr<Session> session_;
  std::vector<EValue*> args_;
  std::vector<mx::array> outputs_;  // for later calls: the host never reads them, because MLX would move their memory
  std::vector<mx::array> copies_;  // for the host
  mx::Stream stream_;
  uint64_t failures_;
};

// What executorch_mlx_defer() asks of the next call.
struct Deferral {
  const DeferredCall* source = nullptr;  // null: the call reads its inputs
  const void* output = nullptr;
  std::vector<int64_t> elements;
};

// Returns what the caller has asked of this call, and nullopt if it is a usual one.
std::optional<Deferral> take_deferral();

// Gives the call to executorch_mlx_deferred_take().
void set_deferred(std::unique_ptr<DeferredCall> call);

// The slot of the input named "tokens", if it is int64; nullopt if there is none.
std::optional<uint32_t> tokens_slot(const Program& program);

// Replaces the contents of the slot by those that the deferral describes.
void set_tokens(const Deferral& deferral, mx::array& tokens, mx::Stream stream);

// Copies of arrays in memory of their own, not evaluated.
std::vector<mx::array> copies_of(const std::vector<mx::array>& arrays, mx::Stream stream);

} // namespace executorch_mlx
