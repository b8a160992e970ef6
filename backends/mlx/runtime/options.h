// What a program can be loaded with: ExecuTorch's load options ("runtime specs") of
// one load, over the backend's own options, which are the process's defaults.
#pragma once

#include <executorch/runtime/backend/options.h>

#include <mutex>
#include <string>
#include <vector>

namespace executorch_mlx {

// A flag may also come as the text "true" or "false", for those who have only texts.
struct Options {
  // "cpu", "gpu", or "" for the environment's EXECUTORCH_MLX_DEVICE, else MLX's default.
  std::string device;

  // Whether to run Metal source that a program carries: code inside a model file is
  // code. Needs a build with EXECUTORCH_MLX_METAL_KERNELS and Apple's GPU.
  bool metal_kernels = false;

  // Positions that the caches of UpdateAndAttendNode keep, which the program does not
  // say: layer i keeps the last `kv_windows[i % size]` in a ring, or all of them where
  // that is 0. As a text, "512,512,0". Empty: all.
  std::vector<int> kv_windows;
};

// Sets one option by its name. Throws Failure for a name or a value that is none.
void set(Options& options, const executorch::runtime::BackendOption& option);

// The value of the option `option.key`.
void get(const Options& options, executorch::runtime::BackendOption& option);

// The process's defaults. Any thread may come.
class DefaultOptions {
 public:
  Options get() const {
    std::lock_guard lock(mutex_);
    return options_;
  }
  // All of them or none.
  void set(executorch::runtime::Span<const executorch::runtime::BackendOption> changes);

 private:
  mutable std::mutex mutex_;
  Options options_;
};

} // namespace executorch_mlx
