// What mlx_llm_runner --json prints: an object a line.
#pragma once

#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace executorch_mlx {

std::string token_line(size_t row, int64_t id, std::string_view text);
std::string answer_line(size_t row, const GenerateResult& result, double load_seconds);

} // namespace executorch_mlx
