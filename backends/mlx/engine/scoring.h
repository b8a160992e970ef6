// Scores of tokens that are given and not drawn: the method verify computes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "llm_program.h"
#include "scheduler.h"

namespace executorch_mlx::engine {

// Writes the log probability of each of `targets` after `prompt` and the targets before it, and to `is_greedy`, unless
// it is null, whether the target is the most likely token. Throws EngineError.
void score(LlmProgram& program, Scheduler& scheduler, std::vector<int64_t> prompt, const std::vector<int64_t>& targets,
    float* logprobs, bool* is_greedy);

// Writes the `count` most likely tokens at the place of each of `targets`, and their log probabilities, both
// [targets, count]. Throws EngineError.
void score_top(LlmProgram& program, Scheduler& scheduler, std::vector<int64_t> prompt,
    const std::vector<int64_t>& targets, size_t count, int64_t* tokens, float* logprobs);

} // namespace executorch_mlx::engine
