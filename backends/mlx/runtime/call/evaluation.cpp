#include "call/evaluation.h"

#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "error.h"
#include "gpu/fused.h"
#include "memory/limit.h"
#include "memory/plan.h"
#include "mlx_internals/cpu_task.h"
#include "mlx_internals/cuda.h"
#include "mlx_internals/internals.h"

namespace executorch_mlx {

namespace {

constexpr int kMaxErrorsOfGpu = 16; // of one settle()

// What is under way on a stream.
struct Work {
  std::mutex mutex; // held by an evaluation
  std::shared_ptr<Owner> owner; // of the work that was started and not waited for, or null. Guarded by `mutex`
};

Work& work_of(mx::Stream stream) {
  static std::mutex mutex;
  static auto* const all = new std::map<int, Work>(); // never destroyed: methods may be unloaded at the very end
  std::lock_guard lock(mutex);
  return (*all)[stream.index];
}

// The same as settle(). Returns whether work has failed. The caller holds the mutex of the stream.
bool settle_locked(mx::Stream stream) {
  const auto owner = std::exchange(work_of(stream).owner, nullptr);
  int errors = 0;
  for (bool is_idle = false; !is_idle;) {
    try {
      mx::synchronize(stream);
      is_idle = true;
    } catch (...) {
      // On a CPU, MLX throws each error once. An illegal access of memory on an NVIDIA GPU fails all later calls of
      // CUDA.
      is_idle = ++errors == kMaxErrorsOfGpu && stream.device == mx::Device::gpu;
    }
  }
  if (internals::are_usable()) {
    internals::complete_count_of_tasks(stream);
  }
  if (owner != nullptr && errors > 0) {
    ++owner->failures;
  }
  return errors > 0;
}

// Waits for work of another owner, so that all later errors on the stream are of `owner`.
void wait_for_other_owner(mx::Stream stream, const std::shared_ptr<Owner>& owner) {
  const auto other = work_of(stream).owner;
  if (other != nullptr && other != owner && settle_locked(stream)) {
    other->has_lost_work = true;
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
    fail(Error::NotSupported,
        "MLX compiles kernels at run time and cannot find the headers of CUDA: set CUDA_HOME to a CUDA toolkit whose "
        "folder include/ contains cuda_fp16.h (",
        missing_header(message), ")");
  }
}

} // namespace

Evaluation::Evaluation(std::vector<mx::array> arrays, mx::Stream stream, std::shared_ptr<Owner> owner,
    const std::vector<std::uintptr_t>& overwritable)
    : lock_(work_of(stream).mutex), stream_(stream), owner_(std::move(owner)) {
  wait_for_other_owner(stream, owner_);
  gpu::join_sequences(arrays);
  const size_t limit = memory_limit();
  if (limit == kNoMemoryLimit) [[likely]] {
    stages_.push_back(std::move(arrays));
  } else {
    memory_lock_ = std::unique_lock(memory_mutex());
    stages_ = plan_stages(std::move(arrays), overwritable, active_memory(), limit);
  }
}

template <typename Body>
void Evaluation::settle_on_error(Body&& body) {
  const auto settle = [&] {
    if (owner_ != nullptr) {
      ++owner_->failures;
    }
    settle_locked(stream_);
  };
  try {
    body();
  } catch (const std::exception& error) {
    settle();
    check_cuda_headers(error);
    throw;
  } catch (...) {
    settle();
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

std::unique_ptr<gpu::WorkReplay> Evaluation::record() {
  std::unique_ptr<gpu::WorkReplay> result;
  settle_on_error([&] { result = gpu::WorkReplay::evaluate(std::exchange(stages_.front(), {}), stream_); });
  return result;
}

void Evaluation::start(const std::function<void()>& before) {
  settle_on_error([&] {
    work_of(stream_).owner = owner_;
    if (before != nullptr) {
      before();
    }
    for (auto& stage : stages_) {
      auto arrays = std::exchange(stage, {});
      &stage == &stages_.back() ? mx::async_eval(std::move(arrays)) : mx::eval(std::move(arrays));
    }
  });
}

void Evaluation::wait() {
  settle_on_error([&] {
    mx::synchronize(stream_);
    work_of(stream_).owner.reset();
  });
}

void wait_for(std::vector<mx::array>& arrays, mx::Stream stream, Owner& owner) {
  std::lock_guard lock(work_of(stream).mutex); // no other owner gets the errors of this one, or the other way round
  try {
    for (auto& array : arrays) {
      array.wait();
    }
  } catch (...) {
    ++owner.failures;
    settle_locked(stream);
    throw;
  }
}

void check_no_failure_since(const Owner& owner, uint64_t before) {
  if (owner.failures != before) {
    fail(Error::Internal, "an evaluation failed while the call ran");
  }
}

void settle(mx::Stream stream) {
  std::lock_guard lock(work_of(stream).mutex);
  settle_locked(stream);
}

void evaluate(std::vector<mx::array> arrays, mx::Stream stream) {
  Evaluation(std::move(arrays), stream, nullptr).run();
}

} // namespace executorch_mlx
