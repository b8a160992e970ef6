// The output of mlx_llm_runner --json: one JSON object per line.
#pragma once

#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace executorch_mlx {

// Return the line for one token, and the line for a complete answer. `sequence` is the index of the prompt.
std::string token_line(size_t sequence, int64_t id, std::string_view text);
std::string answer_line(size_t sequence, const GenerateResult& result, double load_seconds);

} // namespace executorch_mlx
