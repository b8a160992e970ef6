// The profile of a run, for ExecuTorch's Inspector.
#pragma once

#include <executorch/devtools/etdump/etdump_flatcc.h>

#include <mutex>
#include <string>

namespace executorch_mlx::engine {

class Profile {
 public:
  executorch::runtime::EventTracer* tracer() { return &tracer_; }

  // Must be held during every call that the tracer records.
  std::unique_lock<std::mutex> lock() { return std::unique_lock(mutex_); }

  // Writes what was recorded since the last call of this function to the file `path`, in the ETDump format. Waits until
  // no call is recorded. Throws std::runtime_error if nothing was recorded or the file cannot be written.
  void write(const std::string& path);

 private:
  executorch::etdump::ETDumpGen tracer_;
  std::mutex mutex_;
};

// Writes what `tracer` recorded, as Profile::write() does. The tracer cannot be used afterwards.
void write_profile(executorch::etdump::ETDumpGen& tracer, const std::string& path);

} // namespace executorch_mlx::engine
