// Load options. ExecuTorch passes those of one program as "runtime specs". The backend's own options
// are the defaults of the process.
#pragma once

#include <executorch/runtime/backend/options.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace executorch_mlx {

// What one call of a program may use. Both defaults are far above any real call.
struct Limits {
  // The option "max_instructions": instructions, counting each iteration of a loop.
  int64_t instructions = int64_t{1} << 24;

  // The option "max_operations": elements read and written, and multiplications in matrix products, attention and
  // convolutions.
  int64_t operations = int64_t{1} << 50;
};

// Every value may also be given as a string.
struct Options {
  // "cpu", "gpu", or "". "" means the environment variable EXECUTORCH_MLX_DEVICE if it is set, or
  // else MLX's default device.
  std::string device;

  // Whether a program may run the Metal source that it contains. Such a program executes code from
  // the model file. Needs a build with EXECUTORCH_MLX_METAL_KERNELS and an Apple GPU.
  bool metal_kernels = false;

  // The sizes of the KV caches of UpdateAndAttendNode, in positions. Layer i has a ring buffer of
  // `kv_windows[i % size]` positions, or a linear cache if that is 0. As a string: "512,512,0".
  // Empty: all caches are linear.
  std::vector<int> kv_windows;

  Limits limits;
};

// Sets the option `option.key`. Throws Failure for an unknown key or an invalid value.
void set(Options& options, const executorch::runtime::BackendOption& option);

// Reads the option `option.key` into `option.value`.
void get(const Options& options, executorch::runtime::BackendOption& option);

// The defaults of the process. Thread-safe.
class DefaultOptions {
 public:
  Options get() const {
    std::lock_guard lock(mutex_);
    return options_;
  }
  // Applies all changes, or none if one is invalid.
  void set(executorch::runtime::Span<const executorch::runtime::BackendOption> changes);

 private:
  mutable std::mutex mutex_;
  Options options_;
};

} // namespace executorch_mlx
