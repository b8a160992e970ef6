#include "scoring.h"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>

#include "call_limit.h"
#include "check.h"
#include "option_checks.h"

namespace executorch_mlx::engine {

namespace {

// The largest number of tokens in a call that scores. `verify` computes the logits of all its tokens, which take much
// memory, and running answers wait for the call.
constexpr int64_t kScoredTokens = 64;

// Runs the method verify over the tokens that predict `targets` after `prompt`, in several calls. `call` makes a call:
// its arguments are the task, and the number of targets before it. `function` is the name for errors.
void verify_targets(const LlmProgram& program, Scheduler& scheduler, std::vector<int64_t> prompt,
    const std::vector<int64_t>& targets, const char* function,
    const std::function<void(const RowTask&, size_t)>& call) {
  check_prompt(program.metadata(), prompt);
  check_prompt(program.metadata(), targets, "targets");
  check_argument(program.max_verify() > 0 && program.metadata().logprobs > 0, function,
      ": the program was exported without the method verify or without logprobs");
  const size_t prompt_length = prompt.size();
  // The last token of the prompt predicts the first target. Each target except the last predicts the target after it.
  std::vector<int64_t> inputs = {prompt.back()};
  inputs.insert(inputs.end(), targets.begin(), targets.end() - 1);
  prompt.pop_back();
  const auto total = static_cast<int64_t>(prompt.size() + inputs.size());
  check_argument(total <= program.metadata().max_context_len, "targets: got ", prompt_length, " tokens and ",
      targets.size(), " targets, expected at most ", static_cast<uint64_t>(program.metadata().max_context_len) + 1,
      " together");
  const size_t prompt_inputs = prompt.size();
  CallLimit limit(1, std::min(program.max_verify(), kScoredTokens));
  scheduler.run(std::move(prompt), [&](Row& row) { // the row holds the prompt
    const size_t done = row.ids.size() - prompt_inputs;
    const auto rest = std::span(inputs).subspan(done);
    const RowTask task = {.tokens = rest.first(std::min(rest.size(), static_cast<size_t>(limit.value()))),
        .position = static_cast<int64_t>(row.ids.size()),
        .row = row.index,
        .wants_logprobs = true};
    row.expect(task);
    try {
      call(task, done);
    } catch (const EngineError& error) {
      if (error.status != EXECUTORCH_MLX_OUT_OF_MEMORY || !limit.lower(std::ssize(task.tokens))) {
        throw;
      }
      row.go_back(program.metadata());
      return true;
    }
    row.append(task.tokens);
    return task.tokens.size() < rest.size();
  });
}

} // namespace

void score(LlmProgram& program, Scheduler& scheduler, std::vector<int64_t> prompt, const std::vector<int64_t>& targets,
    float* logprobs, bool* is_greedy) {
  verify_targets(program, scheduler, std::move(prompt), targets, "score", [&](RowTask task, size_t done) {
    task.targets = std::span(targets).subspan(done, task.tokens.size());
    std::vector<float> values;
    const auto drawn = program.verify(task, &values);
    for (size_t i = 0; i < drawn.size(); ++i) {
      logprobs[done + i] = values[i];
      if (is_greedy != nullptr) {
        is_greedy[done + i] = drawn[i].token == task.targets[i];
      }
    }
  });
}

void score_top(LlmProgram& program, Scheduler& scheduler, std::vector<int64_t> prompt,
    const std::vector<int64_t>& targets, size_t count, int64_t* tokens, float* logprobs) {
  check_argument(program.metadata().logprobs == 0 || program.verifies_logprobs(), program.path(),
      " is of an earlier version, which cannot return the most likely tokens of a prompt; export it again");
  const auto most = static_cast<size_t>(program.metadata().logprobs);
  check_argument(count <= most, "top_count: got ", count, ", expected at most ", most);
  verify_targets(program, scheduler, std::move(prompt), targets, "score_top", [&](const RowTask& task, size_t done) {
    for (const Drawn& drawn : program.verify(task)) {
      std::copy_n(drawn.top_tokens.begin(), count, tokens + done * count);
      std::copy_n(drawn.top_logprobs.begin(), count, logprobs + done * count);
      ++done;
    }
  });
}

} // namespace executorch_mlx::engine
