#include "call/evaluation.h"

#include <mlx/scheduler.h>

#include <atomic>
#include <string_view>

#include "error.h"
#include "gpu/fused.h"
#include "memory/limit.h"
#include "memory/plan.h"

namespace executorch_mlx {

namespace {

std::atomic<uint64_t> failures = 0;

constexpr int kMaxErrorsOfGpu = 16;  // of one settle()

// The same as settle(). The caller holds memory_mutex().
void settle_locked(mx::Stream stream) {
  int errors = 0;
  for (bool is_idle = false; !is_idle;) {
    try {
      mx::synchronize(stream);
      is_idle = true;
    } catch (const std::exception&) {
      ++failures;
      // On a CPU, MLX throws each error once. An illegal access of memory on an NVIDIA GPU fails all later calls of
      // CUDA.
      is_idle = stream.device == mx::Device::gpu && ++errors == kMaxErrorsOfGpu;
    }
  }
  // MLX counts the tasks of kernels that it has started, and waits if they are many. If the error of an earlier kernel
  // surfaces while MLX starts a task, MLX never counts this task as completed. After a dozen such errors, the process
  // would wait forever. So this loop completes the count. If another thread uses MLX beside this library, the count may
  // then be too small, and MLX only starts more tasks before it waits.
  while (stream.device == mx::Device::cpu && mx::scheduler::n_active_tasks() > 0) {
    mx::scheduler::notify_task_completion(stream);
  }
}

// The part of a compiler's message that names the header, or the first line of the message.
std::string_view missing_header(std::string_view message) {
  const auto at = message.find("cannot open source file");
  message.remove_prefix(at == std::string_view::npos ? 0 : at);
  return message.substr(0, message.find('\n'));
}

// On an NVIDIA GPU, MLX compiles kernels at run time, with the headers of the CUDA toolkit. Throws a Failure that says
// so if `error` comes from missing headers.
void check_cuda_headers(const std::exception& error) {
  const std::string_view message = error.what();
  const auto mentions = [&](std::string_view text) { return message.find(text) != std::string_view::npos; };
  if (mentions("locations of CUDA headers") ||
      (mentions("Failed to compile kernel") && mentions("cannot open source file"))) {
    fail(
        Error::NotSupported,
        "MLX compiles kernels at run time and cannot find the headers of CUDA: set CUDA_HOME to a CUDA toolkit whose "
        "folder include/ contains cuda_fp16.h (", missing_header(message), ")");
  }
}

} // namespace

Evaluation::Evaluation(
    std::vector<mx::array> arrays, mx::Stream stream, const std::vector<std::uintptr_t>& overwritable)
    : lock_(memory_mutex()), stream_(stream) {
  gpu::join_sequences(arrays);
  const size_t limit = memory_limit();
  if (limit == kNoMemoryLimit) [[likely]] {
    stages_.push_back(std::move(arrays));
  } else {
    stages_ = plan_stages(std::move(arrays), overwritable, active_memory(), limit);
  }
}

template <typename Body>
void Evaluation::settle_on_error(Body&& body) {
  try {
    body();
  } catch (const std::exception& error) {
    ++failures;
    settle_locked(stream_);
    check_cuda_headers(error);
    throw;
  } catch (...) {
    ++failures;
    settle_locked(stream_);
    throw;
  }
}

void Evaluation::run() {
  settle_on_error([&] {
    for (auto& stage : stages_) {
      mx::eval(std::exchange(stage, {}));
    }
  });
}

void Evaluation::start() {
  settle_on_error([&] {
    for (auto& stage : stages_) {
      auto arrays = std::exchange(stage, {});
      &stage == &stages_.back() ? mx::async_eval(std::move(arrays)) : mx::eval(std::move(arrays));
    }
  });
}

void Evaluation::wait() {
  settle_on_error([&] { mx::synchronize(stream_); });
}

uint64_t failed_evaluations() {
  return failures;
}

void check_no_failure_since(uint64_t before) {
  if (failures != before) {
    fail(Error::Internal, "an evaluation failed while the call ran");
  }
}

void settle(mx::Stream stream) {
  std::lock_guard lock(memory_mutex());
  settle_locked(stream);
}

void evaluate(std::vector<mx::array> arrays, mx::Stream stream) {
  Evaluation(std::move(arrays), stream).run();
}

} // namespace executorch_mlx
