// Scores of tokens that are given and not drawn: the method verify computes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "llm_program.h"
#include "scheduler.h"

namespace executorch_mlx::engine {

// Where the scores of targets go: either the first two, of which `is_greedy` may be null, or the most likely tokens in
// the place of each target. A call of the program computes only one of these.
struct Scores {
  float* logprobs = nullptr; // [targets]
  bool* is_greedy = nullptr; // [targets]: whether the target is the most likely token
  size_t top_count = 0;
  int64_t* top_tokens = nullptr; // [targets, top_count]
  float* top_logprobs = nullptr; // [targets, top_count]
};

// Queues a request that scores `targets`, each after `prompt` and the targets before it. `adapter` may be null.
// `function` is the name for errors. Throws EngineError.
std::shared_ptr<Request> submit_score(LlmProgram& program, Scheduler& scheduler, std::vector<int64_t> prompt,
    std::vector<int64_t> targets, const Scores& scores, std::shared_ptr<const Adapter> adapter, const char* function);

} // namespace executorch_mlx::engine
