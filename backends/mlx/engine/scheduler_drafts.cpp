// Speculation: what the scheduler drafts for a request, and what it does with the tokens that `verify` draws.
#include <algorithm>
#include <new>
#include <utility>

#include "scheduler.h"

namespace executorch_mlx::engine {

// Returns whether this number of answers get their next tokens faster by one call for each of them.
bool Scheduler::prefers_single_steps(size_t running) {
  return running > 1 && costs_.prefers_single_steps(running, program_.decode_width(running));
}

// Returns how many of at most `most` tokens the draft model should guess; 0 if `lookup` or a plain step is faster.
int64_t Scheduler::model_draft_length(int64_t most, size_t running, const StepCosts::Choice& lookup) {
  constexpr int64_t kTrial = 3; // tokens of a draft that only measures the draft model
  const double measured = guesser_->token_seconds();
  const auto choice = costs_.best_draft(guesser_->acceptance.rate(), most, running, program_.decode_width(running),
      measured > 0 ? measured : costs_.assumed_draft_seconds());
  if (choice.length > 0 && (lookup.length == 0 || choice.rate > lookup.rate)) {
    return choice.length;
  }
  return running == 1 && guesser_->is_trial_due() ? std::min(kTrial, most) : 0;
}

// Returns the draft for the next call, or an empty one for a plain step.
Draft Scheduler::propose(const std::shared_ptr<Request>& request, size_t running) {
  if (!request->is_decoding) {
    return {}; // another call of this step has failed
  }
  try {
    return find_draft(request, running);
  } catch (const std::bad_alloc&) { // the answer does not depend on drafts
    return {};
  }
}

// What propose() returns. If the lookup finds a draft that does not pay, its first token is kept in
// Request::plain_guess: the plain step shows whether it is right.
Draft Scheduler::find_draft(const std::shared_ptr<Request>& given, size_t running) {
  Request& request = *given;
  const LlmMetadata& meta = program_.metadata();
  const RequestOptions& options = request.options;
  const bool chooses = options.draft < 0;
  const auto position = static_cast<int64_t>(request.ids.size()) - 1;
  const auto generated = static_cast<int64_t>(request.ids.size() - options.prompt.size());
  const int64_t most = std::min({options.draft > 0 ? int64_t{options.draft} : StepCosts::kMaxDraft, max_draft_.value(),
      program_.max_draft(), meta.max_context_len - position - 1,
      options.max_new_tokens > 0 ? options.max_new_tokens - generated - 1 : StepCosts::kMaxDraft});
  if (options.draft == 0 || most < 1 || (options.logprobs >= 0 && !program_.verifies_logprobs())) {
    return {};
  }
  // A draft ends before the first stop id: tokens behind one are never part of an answer, and the call without it draws
  // the stop id too. It also ends before the first token that the program lacks, because the vocabulary of a draft
  // model may be longer.
  const auto cut = [&](std::vector<int64_t>& tokens) {
    const auto ends = [&](int64_t token) { return token >= meta.vocab_size || request.is_stop_id(token); };
    tokens.erase(std::find_if(tokens.begin(), tokens.end(), ends), tokens.end());
  };
  Draft draft = request.lookup_drafter.propose(request.ids, most);
  cut(draft.tokens);
  request.plain_guess.reset();
  StepCosts::Choice lookup;
  if (chooses && !draft.tokens.empty()) {
    const double rate = request.lookup_drafter.acceptance(draft.level).rate();
    const auto length = static_cast<int64_t>(draft.tokens.size());
    lookup = costs_.best_draft(rate, length, running, program_.decode_width(running), 0);
  }
  if (guesser_ && request.pictures == nullptr) { // a draft model sees no pictures
    const int64_t length = chooses ? model_draft_length(most, running, lookup) : most;
    if (length > 0) {
      const auto begin = Clock::now();
      // At most, a draft model has not read any of the tokens yet.
      const int64_t chunk = chunk_size(position, static_cast<int64_t>(request.ids.size()), chunk_seconds());
      Draft of_model = {.tokens = guesser_->propose(given, length, chunk), .is_of_model = true};
      recover(); // the head for multi-token prediction has the buffers of the program
      count_steps(0, 0, seconds_since(begin));
      cut(of_model.tokens);
      if (!of_model.tokens.empty()) {
        return of_model;
      }
    }
  }
  if (chooses && !draft.tokens.empty()) {
    if (lookup.length == 0) {
      request.plain_guess = {draft.level, draft.tokens[0]};
    }
    draft.tokens.resize(lookup.length);
  }
  return draft;
}

// Draws the token after each token of a draft. The request gets the drawn tokens up to the first that was not guessed.
void Scheduler::verify(const std::shared_ptr<Request>& request, Draft draft) {
  if (!request->is_decoding) {
    return; // another call of this step has failed
  }
  guarded({request}, [&] {
    Row& row = *request->row;
    RowTask task = request->draw_task(draft.tokens);
    std::vector<int64_t> tokens = {request->ids.back()};
    tokens.insert(tokens.end(), draft.tokens.begin(), draft.tokens.end());
    place(task, *request, tokens, row.ids.size());
    const auto drafted = static_cast<int64_t>(draft.tokens.size());
    const int64_t end = task.position + static_cast<int64_t>(tokens.size());
    const auto begin = Clock::now();
    std::vector<Drawn> drawn;
    if (!fits({request}, max_draft_, drafted, [&] { drawn = program_.verify(task); })) {
      return;
    }
    const double seconds = seconds_since(begin);
    const auto is_right = [](int64_t guess, const Drawn& token) { return guess == token.token; };
    const auto accepted =
        std::mismatch(draft.tokens.begin(), draft.tokens.end(), drawn.begin(), is_right).first - draft.tokens.begin();
    costs_.record_one_row(drafted + 1, seconds);
    auto& acceptance = draft.is_of_model ? guesser_->acceptance : request->lookup_drafter.acceptance(draft.level);
    acceptance.learn(drafted, accepted);
    request->count_call(drafted);
    count_steps(1, drafted, seconds);
    for (int64_t i = 0; i <= accepted && !request->is_over(); ++i) {
      take(request, {&tokens[i], 1}, drawn[i], /*was_drafted=*/i < accepted);
    }
    if (program_.has_rewind() && static_cast<int64_t>(row.ids.size()) < end) {
      fits({request}, max_draft_, drafted, [&] { rewind(row, task); });
    }
  });
}

// Forgets the tokens of a call of verify() that were not taken, or all tokens of the row if that fails. The request may
// be over: the row can then be reused.
void Scheduler::rewind(Row& row, RowTask task) {
  const auto begin = Clock::now();
  task.tokens = task.tokens.first(row.ids.size() - task.position);
  try {
    program_.rewind(task);
  } catch (...) {
    row.truncate(0);
    throw;
  }
  row.written = static_cast<int64_t>(row.ids.size());
  const double seconds = seconds_since(begin);
  costs_.record_rewind(seconds);
  count_steps(0, 0, seconds);
}

} // namespace executorch_mlx::engine
