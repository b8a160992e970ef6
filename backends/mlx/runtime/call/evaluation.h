// The evaluation of arrays on a shared stream, within the memory limit.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// One evaluation. Only one exists at a time in the process: the constructor waits until no other exists.
class Evaluation {
 public:
  // With a memory limit, throws Failure if the evaluation would exceed it; nothing has run in this case. `overwritable`
  // are the ids of arrays that are already evaluated and that the caller releases before run(). Updates of these arrays
  // are made in place and need no new memory.
  Evaluation(
      std::vector<mx::array> arrays, mx::Stream stream, const std::vector<std::uintptr_t>& overwritable = {});

  // Computes the arrays. If MLX throws, waits for the work that has been started before it rethrows, because the caller
  // may free the memory that this work uses.
  void run();

  // Like run(), but returns before the arrays of the last stage are computed.
  void start();

  // Waits for all work that has been started on the stream, and throws as run() does.
  void wait();

 private:
  template <typename Body>
  void settle_on_error(Body&& body);

  std::lock_guard<std::mutex> lock_;
  // The arrays to compute in each stage: one stage, or several to stay below a memory limit. A stage starts when the
  // stage before it has ended and has freed the memory of its intermediate results.
  std::vector<std::vector<mx::array>> stages_;
  mx::Stream stream_;
};

// Waits until nothing runs on the stream, and drops the errors of kernels that fail until then. Call it after MLX has
// thrown.
void settle(mx::Stream stream);

// How many evaluations have failed so far, on any stream. MLX throws the error of a kernel only once, possibly in a
// call that waits for other results. Code that waits for started work must therefore compare this number before and
// after.
uint64_t failed_evaluations();

// Throws Failure if an evaluation has failed since failed_evaluations() returned `failures`.
void check_no_failure_since(uint64_t failures);

// Evaluates arrays and waits for them. Throws as Evaluation does.
void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

} // namespace executorch_mlx
