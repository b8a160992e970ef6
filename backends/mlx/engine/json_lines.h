// The output of mlx_llm_runner --json: one JSON object per line.
#pragma once

#include <executorch_mlx/engine.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace executorch_mlx::engine {

// A complete answer.
struct Answer {
  std::vector<int64_t> tokens; // without the stop id
  std::string text;
  std::optional<std::string> stop_string; // that ended the answer
  executorch_mlx_request_info info = {};

  double prompt_tokens_per_second() const;
  double decode_tokens_per_second() const; // of the tokens after the first
};

// The peak resident memory of this process, in bytes.
int64_t peak_resident_bytes();

// Return the line for one token, and the line for a complete answer. `sequence` is the index of the prompt.
std::string token_line(size_t sequence, int64_t id, std::string_view text);
std::string answer_line(size_t sequence, const Answer& answer, double load_seconds);

} // namespace executorch_mlx::engine
