// The command line of mlx_llm_runner.
#pragma once

#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace executorch_mlx {

struct Arguments {
  bool help = false;
  std::string model;
  std::string device; // cpu, gpu or empty: see LlmRunner
  std::vector<std::vector<int64_t>> prompts; // one, or the rows of a batch
  GenerateConfig config;
  bool ids = false; // ids out instead of text
  bool json = false; // or an object a line, for programs
  int64_t repeat = 1;
  std::string profile; // where to write it; empty: none
};

// A command line that cannot be meant; the message says why.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Reads files and stdin for --prompt-ids @FILE and -.
Arguments parse_arguments(int argc, char** argv);

std::string usage();

} // namespace executorch_mlx
