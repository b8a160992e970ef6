// The evaluation of arrays on a stream, within the memory limit.
#pragma once

#include <mlx/mlx.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace executorch_mlx {

namespace gpu {
class WorkReplay;
}

namespace mx = mlx::core;

// Whose work a stream computes: the methods of a session. MLX reports the error of a kernel only once, possibly to a
// call that waits for other results. If several sessions use a stream, at most one of them therefore has work under way
// there: before another one evaluates anything, this work is waited for, and its errors are counted as failures of its
// owner.
struct Owner {
  // How many evaluations have failed. Code that waits for started work compares this number before and after.
  std::atomic<uint64_t> failures = 0;

  // Whether work failed that nobody was waiting for. The buffers that it should have updated hold nothing valid.
  std::atomic<bool> has_lost_work = false;
};

// One evaluation. Only one exists at a time for a stream, and with a memory limit in the process: the constructor waits
// until no other exists.
class Evaluation {
 public:
  // `owner` may be null if this is no call of a method. With a memory limit, throws Failure if the evaluation would
  // exceed it; nothing has run in this case. `overwritable` are the ids of arrays that are already evaluated and that
  // the caller releases before run(). Updates of these arrays are made in place and need no new memory.
  Evaluation(std::vector<mx::array> arrays, mx::Stream stream, std::shared_ptr<Owner> owner,
      const std::vector<std::uintptr_t>& overwritable = {});

  // Computes the arrays. If MLX throws, waits for the work that has been started before it rethrows, because the caller
  // may free the memory that this work uses.
  void run();

  // Like run(), with a recording of the work: see gpu::WorkReplay. There is no memory limit.
  std::unique_ptr<gpu::WorkReplay> record();

  // Like run(), but returns before the arrays of the last stage are computed. Calls before() first, which may submit
  // other work to the stream.
  void start(const std::function<void()>& before = nullptr);

  // Waits for all work that has been started on the stream, and throws as run() does.
  void wait();

 private:
  template <typename Body>
  void settle_on_error(Body&& body);

  std::lock_guard<std::mutex> lock_; // of the stream
  std::unique_lock<std::mutex> memory_lock_; // memory_mutex(), with a memory limit
  // The arrays to compute in each stage: one stage, or several to stay below a memory limit. A stage starts when the
  // stage before it has ended and has freed the memory of its intermediate results.
  std::vector<std::vector<mx::array>> stages_;
  mx::Stream stream_;
  std::shared_ptr<Owner> owner_;
};

// Waits until nothing runs on the stream, and counts the errors of kernels that fail until then as failures of the
// owner of the work. Call it after MLX has thrown.
void settle(mx::Stream stream);

// Waits for arrays whose computation `owner` has started. Throws as Evaluation::run() does.
void wait_for(std::vector<mx::array>& arrays, mx::Stream stream, Owner& owner);

// Throws Failure if an evaluation of `owner` has failed since owner.failures was `before`.
void check_no_failure_since(const Owner& owner, uint64_t before);

// Evaluates arrays that belong to no call, and waits for them. Throws as Evaluation does.
void evaluate(std::vector<mx::array> arrays, mx::Stream stream);

} // namespace executorch_mlx
