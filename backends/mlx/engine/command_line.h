// The command line of mlx_llm_runner.
#pragma once

#include <executorch_mlx/engine.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace executorch_mlx::engine {

struct RunnerOptions {
  bool help = false;
  std::string model; // path of the .pte file
  std::string draft_model; // path of the draft model; empty: none
  std::string device; // "cpu", "gpu" or "", with the same meaning as for Model
  std::optional<size_t> memory_limit; // in bytes
  std::vector<std::vector<int64_t>> prompts; // if there are several, they run side by side
  RequestOptions request;
  bool ids = false; // print token ids instead of text
  bool json = false; // print JSON lines instead of text
  int64_t repeat = 1; // how many times to generate
  std::string profile; // path of the profile to write; empty: none
};

// Thrown if the command line is invalid.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Returns the options that the command line sets. Reads FILE for `--prompt-ids @FILE`, and stdin for `--prompt-ids -`.
// Throws UsageError if the command line is invalid.
RunnerOptions parse_command_line(int argc, char** argv);

// Returns what --help prints.
std::string usage();

} // namespace executorch_mlx::engine
