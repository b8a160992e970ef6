// The verdicts of earlier processes, in a file.
#pragma once

#include <map>
#include <string>

#include "trial.h"

namespace executorch_mlx::gpu {

// What the verdicts depend on: the device, the system, and the versions of MLX and of this library.
std::string verdict_key();

// The folder of the file: executorch-mlx in $XDG_CACHE_HOME or ~/.cache, or "" if there is no home.
std::string verdict_folder();

// A file is used only if it is a regular file of this user that nobody else can write, and complete. Everything that is
// unexpected leads to new trials. Writing replaces the whole file at once, so processes may write at the same time. A
// folder that cannot be written only costs time.
class VerdictFile {
 public:
  VerdictFile(const std::string& folder, std::string key);

  // A verdict, or a trial that has begun and not ended.
  struct Entry {
    Verdict verdict;
    int process = 0; // that holds the trial, or 0
    int attempts = 0; // how many trials have begun since the last one that ended
  };

  // By the name of the kernel. Empty if there is no valid file for the key.
  std::map<std::string, Entry> read() const;
  void write(const std::map<std::string, Entry>& entries) const;

  const std::string& path() const { return path_; }

 private:
  std::string folder_, key_, path_;
};

} // namespace executorch_mlx::gpu
