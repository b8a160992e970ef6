// Validates a request before it is queued.
#pragma once

#include <cstdint>
#include <span>

#include "llm_program.h"
#include "options.h"

namespace executorch_mlx::engine {

// Checks the token ids with which a row shall begin. `argument` is their name in error messages. Throws EngineError.
void check_prompt(const LlmMetadata& metadata, std::span<const int64_t> prompt, const char* argument = "prompt");

// Checks the prompt, the sampling parameters and the conditions that end the answer. Throws EngineError.
void check_options(const LlmProgram& program, const RequestOptions& options);

} // namespace executorch_mlx::engine
