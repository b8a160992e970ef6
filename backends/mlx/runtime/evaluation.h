// The evaluation of arrays on a shared stream, within the memory limit.
#pragma once

#include <mlx/mlx.h>

#include <cstdint>
#include <mutex>
#include <vector>

namespace executorch_mlx {

namespace mx = mlx::core;

// One evaluation. Only one exists at a time: the constructor waits for the others.
class Evaluation {
 public:
  // With a memory limit, throws Failure if the evaluation would pass it. Nothing has run then. `overwritable` are the
  // ids of arrays that have their values and that the caller releases before run(): updates of these take no memory.
  Evaluation(
      std::vector<mx::array> arrays, mx::Stream stream, const std::vector<std::uintptr_t>& overwritable = {});

  // Computes the arrays. If MLX throws, first waits for the work that it has started, because the caller may free the
  // memory of that work.
  void run();

 private:
  std::lock_guard<std::mutex> lock_;
  // With a memory limit there may be several. The arrays of one are computed before the next one starts, which frees
  // what only they needed.
  std::vector<std::vector<mx::array>> stages_;
  mx::Stream stream_;
};

void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

} // namespace executorch_mlx
