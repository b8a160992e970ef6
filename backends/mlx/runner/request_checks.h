// Validates a request before anything runs. All functions throw LlmArgumentError.
#pragma once

#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <span>

#include "llm_program.h"

namespace executorch_mlx {

// `prompt` is to be appended at `position`.
void check_prompt(const LlmMetadata& metadata, std::span<const int64_t> prompt, int64_t position);

// Checks what ends the answer, and the sampling parameters.
void check_config(const LlmProgram& program, const GenerateConfig& config);

} // namespace executorch_mlx
