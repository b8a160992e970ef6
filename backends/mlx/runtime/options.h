// Load options. ExecuTorch passes the options for one program as "runtime specs" when it loads the program.
// Options that are set on the backend itself are the defaults for all programs that this process loads.
#pragma once

#include <executorch/runtime/backend/options.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace executorch_mlx {

// The limits on the work of one call of a program. Both defaults are far above what any real call needs. Options can
// only lower them.
struct Limits {
  // The option "max_instructions": executed instructions. An instruction in a loop counts once for each iteration. Each
  // run of a chain, such as an iteration or a branch, counts as one more.
  int64_t instructions = int64_t{1} << 24;

  // The option "max_operations": the number of elements that the call reads and writes, plus the number of
  // multiplications in its matrix products, attention and convolutions. At load, the elements of the mutable buffers
  // are subject to the same limit.
  int64_t operations = int64_t{1} << 50;
};

// The load options of a program. In a BackendOption, the value of any option may also be a string: "true" or "4000".
struct Options {
  // "cpu", "gpu", or "". "" means the environment variable EXECUTORCH_MLX_DEVICE if it is set, or
  // else MLX's default device.
  std::string device;

  // Whether a program may contain Metal source. If true, running the program executes code from the model
  // file. Only a build with EXECUTORCH_MLX_METAL_KERNELS accepts true, and only an Apple GPU can run the code.
  bool metal_kernels = false;

  // The option "priority": whether the program runs on threads of low priority, because nobody waits for it.
  bool has_low_priority = false;

  // The sizes of the KV caches of UpdateAndAttendNode, in positions. Layer i has a ring buffer of
  // `kv_windows[i % kv_windows.size()]` positions, or a linear cache if this number is 0. If the list is
  // empty, all caches are linear. The string "512,512,0" stands for the list of these three numbers.
  std::vector<int> kv_windows;

  Limits limits;
};

// Sets the option `option.key`. Throws Failure for an unknown key or an invalid value.
void set(Options& options, const executorch::runtime::BackendOption& option);

// Reads the option `option.key` into `option.value`. The value of "device" is the device that `options` select now,
// even if no device was set. Throws Failure for an unknown key.
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
