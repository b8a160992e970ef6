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
  // are the ids of arrays that are already evaluated and that the caller releases before run(): updates of these need
  // no new memory.
  Evaluation(
      std::vector<mx::array> arrays, mx::Stream stream, const std::vector<std::uintptr_t>& overwritable = {});

  // Computes the arrays. If MLX throws, settles the stream before it rethrows, because the caller may free the memory of
  // the work that has been started.
  void run();

  // Like run(), but returns before the arrays of the last stage are computed.
  void start();

 private:
  template <typename Body>
  void guarded(Body&& body);

  std::lock_guard<std::mutex> lock_;
  // One stage, or several to stay below a memory limit. The arrays of a stage are computed before the next stage
  // starts; the memory that only they needed is then free.
  std::vector<std::vector<mx::array>> stages_;
  mx::Stream stream_;
};

// Waits until nothing runs on the stream, and drops the errors of kernels that fail until then. Call it after MLX threw.
void settle(mx::Stream stream);

// How many evaluations have failed so far, on any stream. MLX throws the error of a kernel once, and not always where the
// results of this kernel are awaited: who waits for started work compares this number.
uint64_t failed_evaluations();

// Evaluates arrays and waits for them. Throws as Evaluation does.
void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

} // namespace executorch_mlx
