// Validates a request before anything runs. All functions throw LlmArgumentError.
#pragma once

#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <span>

#include "llm_program.h"

namespace executorch_mlx {

// Checks a prompt that is to be appended to the KV cache at `position`.
void check_prompt(const LlmMetadata& metadata, std::span<const int64_t> prompt, int64_t position);

// Checks the sampling parameters and the conditions that end the answer.
void check_config(const LlmProgram& program, const GenerateConfig& config);

} // namespace executorch_mlx
