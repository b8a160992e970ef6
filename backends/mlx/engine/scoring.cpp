#include "scoring.h"

#include <algorithm>
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

// Runs the method verify over the tokens that predict the targets, in several calls.
class Scorer {
 public:
  Scorer(LlmProgram& program, std::vector<int64_t> inputs, std::vector<int64_t> targets, size_t prompt_inputs,
      const Scores& scores)
      : program_(program),
        inputs_(std::move(inputs)),
        targets_(std::move(targets)),
        prompt_inputs_(prompt_inputs),
        scores_(scores),
        limit_(1, std::min(program.max_verify(), kScoredTokens)) {}

  // Makes a call, and returns whether there is another. The row holds the prompt, and the inputs of earlier calls.
  bool operator()(Row& row) {
    const size_t done = row.ids.size() - prompt_inputs_;
    const size_t count = std::min(inputs_.size() - done, static_cast<size_t>(limit_.value()));
    RowTask task;
    task.wants_logprobs = true;
    row.place(task, std::span(inputs_).subspan(done, count), row.ids.size());
    row.expect(task);
    try {
      score(task, done);
    } catch (const EngineError& error) {
      if (error.status != EXECUTORCH_MLX_OUT_OF_MEMORY || !limit_.lower(static_cast<int64_t>(count))) {
        throw;
      }
      row.go_back(program_.metadata());
      return true;
    }
    row.append(task.tokens);
    return done + count < inputs_.size();
  }

 private:
  void score(RowTask task, size_t done) {
    if (scores_.top_tokens != nullptr) {
      for (const Drawn& drawn : program_.verify(task)) {
        std::copy_n(drawn.top_tokens.begin(), scores_.top_count, scores_.top_tokens + done * scores_.top_count);
        std::copy_n(drawn.top_logprobs.begin(), scores_.top_count, scores_.top_logprobs + done * scores_.top_count);
        ++done;
      }
      return;
    }
    task.targets = std::span(targets_).subspan(done, task.tokens.size());
    std::vector<float> values;
    const auto drawn = program_.verify(task, &values);
    for (size_t i = 0; i < drawn.size(); ++i) {
      scores_.logprobs[done + i] = values[i];
      if (scores_.is_greedy != nullptr) {
        scores_.is_greedy[done + i] = drawn[i].token == task.targets[i];
      }
    }
  }

  LlmProgram& program_;
  const std::vector<int64_t> inputs_, targets_;
  const size_t prompt_inputs_;
  const Scores scores_;
  CallLimit limit_;
};

} // namespace

std::shared_ptr<Request> submit_score(LlmProgram& program, Scheduler& scheduler, std::vector<int64_t> prompt,
    std::vector<int64_t> targets, const Scores& scores, std::shared_ptr<const Adapter> adapter, const char* function) {
  const auto most = static_cast<size_t>(program.metadata().logprobs);
  check_prompt(program.metadata(), prompt);
  check_prompt(program.metadata(), targets, "targets");
  check_argument(program.max_verify() > 0 && most > 0, function,
      ": the program was exported without the method verify or without logprobs");
  check_argument((scores.logprobs == nullptr) != (scores.top_tokens == nullptr) &&
          (scores.top_tokens == nullptr) == (scores.top_logprobs == nullptr),
      function, ": expected either logprobs, or top_tokens and top_logprobs");
  check_argument(scores.top_tokens == nullptr || program.verifies_logprobs(), program.path(),
      " is of an earlier version, which cannot return the most likely tokens of a prompt; export it again");
  check_argument(scores.top_count <= most, "top_count: got ", scores.top_count, ", expected at most ", most);
  check_argument(prompt.size() + targets.size() <= static_cast<uint64_t>(program.metadata().max_context_len) + 1,
      "targets: got ", prompt.size(), " tokens and ", targets.size(), " targets, expected at most ",
      static_cast<uint64_t>(program.metadata().max_context_len) + 1, " together");
  // The last token of the prompt predicts the first target. Each target except the last predicts the target after it.
  std::vector<int64_t> inputs = {prompt.back()};
  inputs.insert(inputs.end(), targets.begin(), targets.end() - 1);
  prompt.pop_back();
  const size_t prompt_inputs = prompt.size();
  const auto scorer = std::make_shared<Scorer>(program, std::move(inputs), std::move(targets), prompt_inputs, scores);
  const auto request = std::make_shared<Request>(
      program, std::move(prompt), [scorer](Row& row) { return (*scorer)(row); }, /*yields=*/true);
  request->adapter = std::move(adapter);
  scheduler.submit(request);
  return request;
}

} // namespace executorch_mlx::engine
