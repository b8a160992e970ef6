#include "scheduler.h"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "check.h"
#include "fork_check.h"
#include "host_sampler.h"

namespace executorch_mlx {

namespace {

// The largest chunk on a CPU, unless an option says otherwise. A larger one would not make the matrix products faster,
// and would need more memory for the attention scores. On a GPU, a chunk is as large as the program permits.
constexpr int64_t kCpuChunk = 512;
constexpr double kDefaultChunkSeconds = 0.25;
constexpr int64_t kRaiseLimitsAfter = 1024; // steps

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

} // namespace

Scheduler::Scheduler(LlmProgram& program, LlmProgram* draft, const executorch_mlx_engine_options& options)
    : program_(program),
      options_(options),
      rows_(program, options.reuse_prompts),
      overlaps_((options.overlap < 0 ? !program.runs_on_cpu() : options.overlap > 0) && program.can_defer()),
      max_rows_(static_cast<size_t>(program.metadata().rows)) {
  check_not_forked();
  if (draft != nullptr) {
    guesser_ = std::make_unique<DraftModel>(*draft, options.reuse_prompts);
  } else if (program.has_mtp_head()) {
    guesser_ = std::make_unique<MtpHead>(program);
  }
  thread_ = std::thread([this] { loop(); });
  thread_id_ = thread_.get_id();
}

void Scheduler::close() {
  std::lock_guard closing(closing_);
  {
    std::lock_guard lock(mutex_);
    is_closing_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Scheduler::submit(std::shared_ptr<Request> request) {
  check_not_forked();
  {
    std::lock_guard lock(mutex_);
    check(!is_closing_, EXECUTORCH_MLX_FAILED, "engine: it is closed");
    const int64_t free = program_.metadata().rows - stats_.running;
    const bool has_room = options_.queue_limit == 0 || request->work ||
        static_cast<int64_t>(queue_.size()) - free < options_.queue_limit;
    check(has_room, EXECUTORCH_MLX_BUSY, "the queue is full: ", options_.queue_limit, " requests are waiting");
    queue_.push_back(std::move(request));
  }
  changed_.notify_one();
}

void Scheduler::run(std::vector<int64_t> prompt, std::function<bool(Row&)> work) {
  check_argument(!is_on_thread(), "engine: a callback must not wait for it");
  const auto request = std::make_shared<Request>(program_, std::move(prompt), std::move(work));
  submit(request);
  request->wait(-1);
  const auto info = request->info();
  check(info.finish != EXECUTORCH_MLX_CANCELLED, EXECUTORCH_MLX_FAILED, "engine: it is closed");
  check(info.finish != EXECUTORCH_MLX_FINISH_ERROR, info.status, request->error());
}

executorch_mlx_engine_stats Scheduler::stats() const {
  check_not_forked(); // a thread may have held the mutex during the fork
  std::lock_guard lock(mutex_);
  auto stats = stats_;
  stats.rows = program_.metadata().rows;
  stats.waiting = static_cast<int64_t>(queue_.size());
  return stats;
}

void Scheduler::loop() {
  while (wait_for_work()) {
    end_cancelled();
    begin_next();
    advance_prompt();
    step();
  }
  for (const auto& request : Requests(running_)) {
    end(request, EXECUTORCH_MLX_CANCELLED);
  }
  finish_pending();
  std::unique_lock lock(mutex_);
  while (!queue_.empty()) {
    const auto request = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    end(request, EXECUTORCH_MLX_CANCELLED);
    lock.lock();
  }
}

// Returns false if the engine is closing.
bool Scheduler::wait_for_work() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return is_closing_ || !queue_.empty() || !running_.empty(); });
  return !is_closing_;
}

void Scheduler::end_cancelled() {
  Requests cancelled;
  // Each flag is read once, because other threads may set it at any time.
  const auto take_cancelled = [&](const auto& request) {
    return request->is_cancelled() && (cancelled.push_back(request), true);
  };
  std::for_each(running_.begin(), running_.end(), take_cancelled);
  {
    std::lock_guard lock(mutex_);
    std::erase_if(queue_, take_cancelled);
  }
  for (const auto& request : cancelled) {
    end(request, EXECUTORCH_MLX_CANCELLED);
  }
  if (running_.empty()) {
    finish_pending();
  }
}

// Gives a row to the first of the waiting requests with the highest priority, unless a prompt is being processed.
void Scheduler::begin_next() {
  const bool has_prompt =
      std::any_of(running_.begin(), running_.end(), [](const auto& request) { return !request->is_decoding; });
  if (has_prompt || !rows_.has_free()) {
    return;
  }
  std::shared_ptr<Request> request;
  {
    std::lock_guard lock(mutex_);
    const auto next = std::max_element(queue_.begin(), queue_.end(), [](const auto& a, const auto& b) {
      return a->options.priority < b->options.priority;
    });
    if (next == queue_.end()) {
      return;
    }
    request = std::move(*next);
    queue_.erase(next);
    ++stats_.running;
  }
  finish_pending(); // rows may be copied
  // A call needs at least one token, so that the last one of a prompt is never reused for an answer.
  const auto length = static_cast<int64_t>(request->ids.size());
  Row* row = nullptr;
  try {
    row = rows_.take(request->ids, request->work ? length : length - 1, request->options.samples.get());
  } catch (const std::bad_alloc&) {
    row = rows_.take({}, 0); // without reuse, which needs memory
  }
  row->request = request;
  request->row = row;
  running_.push_back(request);
  request->begin(static_cast<int64_t>(row->ids.size()));
}

// Feeds the next chunk of a prompt. The last chunk of an answer's prompt draws the first token.
void Scheduler::advance_prompt() {
  const auto found =
      std::find_if(running_.begin(), running_.end(), [](const auto& request) { return !request->is_decoding; });
  if (found == running_.end()) {
    return;
  }
  const auto request = *found;
  finish_pending();
  guarded({request}, [&] {
    encode(*request);
    // The work may add tokens to the row.
    const auto rest = std::span(request->ids).subspan(std::min(request->ids.size(), request->row->ids.size()));
    const auto begin = static_cast<int64_t>(request->row->ids.size());
    const auto chunk = rest.first(static_cast<size_t>(chunk_size(begin, static_cast<int64_t>(rest.size()))));
    if (rest.empty()) {
      if (!request->work(*request->row)) {
        end(request, EXECUTORCH_MLX_LENGTH);
      }
    } else if (request->work || chunk.size() < rest.size()) {
      feed(*request, chunk);
    } else {
      request->is_decoding = true;
      draw({&request, 1});
    }
  });
}

// The size of the next chunk of a prompt of which `rest` tokens, from `position`, are not yet read. While answers run, a
// chunk should take options_.chunk_seconds.
int64_t Scheduler::chunk_size(int64_t position, int64_t rest) const {
  const int64_t most = program_.metadata().max_seq_len;
  const int64_t preferred = options_.chunk > 0 ? options_.chunk : program_.runs_on_cpu() ? kCpuChunk : most;
  const int64_t limit = std::min(preferred, most);
  if (running_.size() == 1) {
    return std::min(limit, rest);
  }
  const double seconds = options_.chunk_seconds > 0 ? options_.chunk_seconds : kDefaultChunkSeconds;
  return chunk_times_.next_size(position, rest, limit, seconds);
}

// Runs the encoder of a speech model, unless the row holds what it computes for the sound of the request.
void Scheduler::encode(Request& request) {
  Row& row = *request.row;
  const auto& samples = request.options.samples;
  if (samples == nullptr || row.has_same_sound(samples.get())) {
    return;
  }
  const auto begin = Clock::now();
  row.samples.reset();
  row.truncate(0);
  program_.encode(*samples);
  row.samples = samples;
  count_steps(0, 0, seconds_since(begin));
}

// Adds tokens to the row of a request. What the program returns is discarded.
void Scheduler::feed(Request& request, std::span<const int64_t> tokens) {
  const auto begin = Clock::now();
  const RowTask task = {
      .tokens = tokens, .position = static_cast<int64_t>(request.row->ids.size()), .row = request.row->index};
  if (request.samples_on_host) {
    program_.logits({&task, 1});
  } else {
    program_.draw({&task, 1});
  }
  request.row->append(tokens);
  const double seconds = seconds_since(begin);
  chunk_times_.record(task.position, static_cast<int64_t>(tokens.size()), seconds);
  count_steps(0, 0, seconds);
}

// Draws the next token of every running answer. An answer for which speculation pays may get several tokens.
void Scheduler::step() {
  // Calls that did not fit into memory are tried again from time to time: memory may have been freed since.
  if (++steps_since_limit_ == kRaiseLimitsAfter) {
    steps_since_limit_ = 0;
    max_rows_ = std::min(2 * max_rows_, static_cast<size_t>(program_.metadata().rows));
    max_draft_ = std::min(2 * max_draft_ + 1, StepCosts::kMaxDraft);
  }
  if (!pending_.empty()) {
    may_follow_pending() ? advance_pending() : finish_pending();
    if (!pending_.empty()) {
      return;
    }
  }
  Requests head, host; // by what draws their tokens: the sampling head, or the host
  for (const auto& request : running_) {
    if (request->is_decoding) {
      (request->samples_on_host ? host : head).push_back(request);
    }
  }
  std::vector<std::pair<std::shared_ptr<Request>, Draft>> drafts;
  const size_t running = head.size();
  std::erase_if(head, [&](const auto& request) {
    Draft draft = propose(request, running);
    if (draft.tokens.empty()) {
      return false;
    }
    drafts.emplace_back(request, std::move(draft));
    return true;
  });
  const bool one_by_one = prefers_single_steps(head.size());
  const auto overlaps = [this](const auto& request) { return can_overlap(*request); };
  const bool submits_ahead = drafts.empty() && host.empty() && std::all_of(head.begin(), head.end(), overlaps);
  const size_t per_call = one_by_one ? 1 : max_rows_;
  for (size_t i = 0; i < head.size(); i += per_call) {
    const Requests requests(head.begin() + i, head.begin() + std::min(i + per_call, head.size()));
    if (submits_ahead) {
      guarded(requests, [&] { split_if_too_large(requests, [&] { pending_.push_back(submit(requests)); }); });
    } else {
      draw(requests);
    }
  }
  for (auto& [request, draft] : drafts) {
    verify(request, std::move(draft));
  }
  const size_t per_host_call = program_.has_logits_of_rows() ? max_rows_ : 1;
  for (size_t i = 0; i < host.size(); i += per_host_call) {
    draw(std::span(host).subspan(i, std::min(per_host_call, host.size() - i)));
  }
}

// Whether a step of this request may be submitted before the host knows the token of the previous step.
bool Scheduler::can_overlap(const Request& request) const {
  const RequestOptions& options = request.options;
  return overlaps_ && !request.samples_on_host && options.allowed_tokens == nullptr &&
      !program_.metadata().speech.is_speech() && (guesser_ == nullptr || options.draft == 0);
}

// Whether this request needs a draw after its pending one, unless the pending token turns out to end the answer.
bool Scheduler::needs_draw_after_pending(const Request& request) const {
  if (request.is_over()) {
    return false;
  }
  const auto generated = static_cast<int64_t>(request.ids.size() - request.options.prompt.size());
  const auto position = static_cast<int64_t>(request.row->ids.size()) + 1;
  const int64_t most = request.options.max_new_tokens;
  return (most == 0 || generated + 1 < most) && position < program_.metadata().max_context_len;
}

// Whether the next step can be submitted before the pending tokens are read. This is so if it makes the same calls as
// the pending step, except for requests that certainly end with their pending token.
bool Scheduler::may_follow_pending() {
  const size_t running =
      std::count_if(running_.begin(), running_.end(), [](const auto& request) { return request->is_decoding; });
  size_t pending = 0;
  for (const PendingStep& step : pending_) {
    if (!step.draw.can_be_source()) {
      return false;
    }
    for (const auto& request : step.requests) {
      pending += !request->is_over();
      if (needs_draw_after_pending(*request) && !propose(request, running).tokens.empty()) {
        return false; // a draft is likely to pay as soon as the pending token is known
      }
    }
  }
  return pending == running && (running < 2 || prefers_single_steps(running) == (pending_.size() > 1));
}

// Submits the calls of the next step, and takes the tokens of the pending calls.
void Scheduler::advance_pending() {
  for (PendingStep& step : std::exchange(pending_, {})) {
    Requests requests;
    std::copy_if(step.requests.begin(), step.requests.end(), std::back_inserter(requests), [this](const auto& request) {
      return needs_draw_after_pending(*request);
    });
    std::optional<PendingStep> next;
    std::exception_ptr error;
    try {
      if (!requests.empty()) {
        split_if_too_large(requests, [&] { next = submit(requests, &step); });
      }
    } catch (...) {
      error = std::current_exception(); // ends only requests that their pending token does not end
    }
    finish(std::move(step));
    if (error != nullptr) {
      guarded(requests, [&] { std::rethrow_exception(error); });
    }
    if (next && std::any_of(requests.begin(), requests.end(), [](const auto& request) { return !request->is_over(); })) {
      pending_.push_back(std::move(*next));
    } else if (next) {
      finish(std::move(*next));
    }
  }
}

// Submits the next draw of each request, in one call. With `source`, a pending step of these requests, the call takes
// the tokens of `source` on the device.
Scheduler::PendingStep Scheduler::submit(Requests requests, const PendingStep* source) {
  const auto begin = Clock::now();
  const size_t ahead = source == nullptr ? 0 : 1;
  std::vector<RowTask> tasks;
  std::vector<size_t> sources;
  for (const auto& request : requests) {
    std::vector<int64_t> no_draft;
    Row& row = *request->row;
    RowTask task = request->draw_task(no_draft);
    task.seed = request->seed_of_draw(ahead);
    task.tokens = std::span(request->ids).last(1);
    task.position = static_cast<int64_t>(row.ids.size() + ahead);
    task.row = row.index;
    row.written = std::max(row.written, task.position + 1);
    tasks.push_back(task);
    if (source != nullptr) {
      sources.push_back(std::find(source->requests.begin(), source->requests.end(), request) - source->requests.begin());
    }
  }
  PendingDraw draw = program_.submit_draw(tasks, source == nullptr ? nullptr : &source->draw, sources);
  return {std::move(requests), std::move(draw), begin};
}

// Waits for the tokens of a call, and gives them to the requests that are not over.
void Scheduler::finish(PendingStep step) {
  guarded(step.requests, [&] {
    const auto drawn = program_.finish_draw(step.draw);
    const auto now = Clock::now();
    // Calls run one after the other: this one began when it was submitted, or later, when the previous one ended.
    const double seconds = std::chrono::duration<double>(now - std::max(step.submitted, finished_)).count();
    finished_ = now;
    const size_t running = step.requests.size();
    running == 1 ? costs_.record_one_row(1, seconds) : costs_.record_rows(program_.decode_width(running), seconds);
    count_steps(1, 0, seconds);
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const auto& request = step.requests[i];
      if (!request->is_over()) {
        const int64_t fed = request->ids.back();
        take_plain(request, {&fed, 1}, drawn[i]);
      }
    }
  });
}

void Scheduler::finish_pending() {
  for (PendingStep& step : std::exchange(pending_, {})) {
    finish(std::move(step));
  }
}

// Returns whether this number of answers get their next tokens faster by one call for each of them.
bool Scheduler::prefers_single_steps(size_t running) {
  return running > 1 && costs_.prefers_single_steps(running, program_.decode_width(running));
}

// Returns how many of at most `most` tokens the draft model should guess; 0 if `lookup` or a plain step is faster.
int64_t Scheduler::model_draft_length(int64_t most, size_t running, const StepCosts::Choice& lookup) {
  constexpr int64_t kTrial = 3; // tokens of a draft that only measures the draft model
  const double measured = guesser_->token_seconds();
  const auto choice = costs_.best_draft(
      guesser_->acceptance.rate(), most, running, program_.decode_width(running),
      measured > 0 ? measured : costs_.assumed_draft_seconds());
  if (choice.length > 0 && (lookup.length == 0 || choice.rate > lookup.rate)) {
    return choice.length;
  }
  return running == 1 && guesser_->is_trial_due() ? std::min(kTrial, most) : 0;
}

// Returns the draft for the next call, or an empty one for a plain step.
Draft Scheduler::propose(const std::shared_ptr<Request>& request, size_t running) {
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
  const auto position = static_cast<int64_t>(request.row->ids.size());
  const auto generated = static_cast<int64_t>(request.ids.size() - options.prompt.size());
  const int64_t most = std::min({
      options.draft > 0 ? int64_t{options.draft} : StepCosts::kMaxDraft, max_draft_, program_.max_draft(),
      meta.max_context_len - position - 1,
      options.max_new_tokens > 0 ? options.max_new_tokens - generated - 1 : StepCosts::kMaxDraft});
  if (options.draft == 0 || most < 1 || (options.logprobs >= 0 && !program_.verifies_logprobs())) {
    return {};
  }
  // A draft ends before the first stop id: tokens behind one are never part of an answer, and the call without it draws
  // the stop id too. It also ends before the first token that the program lacks, because the vocabulary of a draft model
  // may be longer.
  const auto cut = [&](std::vector<int64_t>& tokens) {
    const auto ends = [&](int64_t token) { return token >= meta.vocab_size || request.is_stop_id(token); };
    tokens.erase(std::find_if(tokens.begin(), tokens.end(), ends), tokens.end());
  };
  Draft draft = request.drafter.propose(request.ids, most);
  cut(draft.tokens);
  request.plain_guess.reset();
  StepCosts::Choice lookup;
  if (chooses && !draft.tokens.empty()) {
    const double rate = request.drafter.acceptance(draft.level).rate();
    const auto length = static_cast<int64_t>(draft.tokens.size());
    lookup = costs_.best_draft(rate, length, running, program_.decode_width(running), 0);
  }
  if (guesser_) {
    const int64_t length = chooses ? model_draft_length(most, running, lookup) : most;
    if (length > 0) {
      const auto begin = Clock::now();
      // At most, a draft model has not read any of the tokens yet.
      const int64_t chunk = chunk_size(position, static_cast<int64_t>(request.ids.size()));
      Draft of_model = {.tokens = guesser_->propose(given, length, chunk), .is_of_model = true};
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
  guarded({request}, [&] {
    Row& row = *request->row;
    RowTask task = request->draw_task(draft.tokens);
    std::vector<int64_t> tokens = {request->ids.back()};
    tokens.insert(tokens.end(), draft.tokens.begin(), draft.tokens.end());
    task.tokens = tokens;
    task.position = static_cast<int64_t>(row.ids.size());
    task.row = row.index;
    const auto drafted = static_cast<int64_t>(draft.tokens.size());
    const int64_t end = task.position + static_cast<int64_t>(tokens.size());
    row.written = std::max(row.written, end);
    const auto begin = Clock::now();
    std::vector<Drawn> drawn;
    try {
      drawn = program_.verify(task);
    } catch (const EngineError& error) {
      if (error.status != EXECUTORCH_MLX_OUT_OF_MEMORY || drafted == 0) {
        throw;
      }
      max_draft_ = drafted / 2;
      steps_since_limit_ = 0;
      prepare_retry(*request);
      return;
    }
    const double seconds = seconds_since(begin);
    const auto is_right = [](int64_t guess, const Drawn& token) { return guess == token.token; };
    const auto accepted =
        std::mismatch(draft.tokens.begin(), draft.tokens.end(), drawn.begin(), is_right).first - draft.tokens.begin();
    costs_.record_one_row(drafted + 1, seconds);
    (draft.is_of_model ? guesser_->acceptance : request->drafter.acceptance(draft.level)).learn(drafted, accepted);
    request->count_call(drafted);
    count_steps(1, drafted, seconds);
    for (int64_t i = 0; i <= accepted && !request->is_over(); ++i) {
      take(request, {&tokens[i], 1}, drawn[i], /*was_drafted=*/i < accepted);
    }
    if (program_.has_rewind() && static_cast<int64_t>(row.ids.size()) < end) {
      rewind(row, std::move(task));
    }
  });
}

// Makes a call that draws tokens for these requests. If they are several, and the call does not fit into memory, later
// calls are for fewer rows.
template <typename Call>
void Scheduler::split_if_too_large(const Requests& requests, Call&& call) {
  try {
    call();
  } catch (const EngineError& error) {
    if (error.status != EXECUTORCH_MLX_OUT_OF_MEMORY || requests.size() < 2) {
      throw;
    }
    max_rows_ = requests.size() / 2;
    steps_since_limit_ = 0;
    for (const auto& request : requests) {
      prepare_retry(*request);
    }
  }
}

// After a call that did not fit into memory: if the row cannot go back behind the tokens that it may have read in the
// call, it reads prompt and answer again.
void Scheduler::prepare_retry(Request& request) {
  if (program_.metadata().max_rewind == 0) {
    request.row->truncate(0);
    request.is_decoding = false;
  }
}

// Forgets the tokens of a call of verify() that were not taken. The request may be over: the row can then be reused.
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

// Draws the next token of each request, in one call.
void Scheduler::draw(std::span<const std::shared_ptr<Request>> requests) {
  Requests ready;
  std::vector<RowTask> tasks;
  for (const auto& request : requests) {
    guarded({request}, [&] {
      std::vector<int64_t> no_draft;
      RowTask task = request->draw_task(no_draft);
      task.tokens = std::span(request->ids).subspan(request->row->ids.size());
      task.position = static_cast<int64_t>(request->row->ids.size());
      task.row = request->row->index;
      request->row->written = std::max(request->row->written, task.position + static_cast<int64_t>(task.tokens.size()));
      tasks.push_back(task);
      ready.push_back(request);
    });
  }
  if (ready.empty()) {
    return;
  }
  guarded(ready, [&] {
    std::vector<Drawn> drawn;
    split_if_too_large(ready, [&] { drawn = run_tasks(ready, tasks); });
    for (size_t i = 0; i < drawn.size(); ++i) {
      take_plain(ready[i], tasks[i].tokens, drawn[i]);
    }
  });
}

std::vector<Drawn> Scheduler::run_tasks(
    std::span<const std::shared_ptr<Request>> requests, std::span<const RowTask> tasks) {
  const auto begin = Clock::now();
  const LlmMetadata& meta = program_.metadata();
  std::vector<Drawn> drawn;
  if (!requests[0]->samples_on_host) {
    drawn = program_.draw(tasks);
  } else {
    auto logits = program_.logits(tasks);
    for (size_t i = 0; i < tasks.size(); ++i) {
      const RequestOptions& options = requests[i]->options;
      std::span<const int64_t> history = requests[i]->ids;
      if (meta.history > 0 && static_cast<int64_t>(history.size()) > meta.history) {
        history = history.last(meta.history);
      }
      Drawn& result = drawn.emplace_back();
      const auto own = options.logprobs >= 0 ? logits[i] : std::vector<float>(); // the draw changes the logits
      result.token = draw_on_host(
          {.logits = logits[i], .seed = tasks[i].seed, .history = history, .allowed_tokens = tasks[i].allowed_tokens},
          options.sampling);
      if (options.logprobs >= 0) {
        result.logprob = log_probabilities(own, {&result.token, 1})[0];
        result.top_tokens = most_likely(own, options.logprobs);
        result.top_logprobs = log_probabilities(own, result.top_tokens);
      }
    }
  }
  const double seconds = seconds_since(begin);
  if (!requests[0]->samples_on_host && tasks.size() > 1) {
    costs_.record_rows(program_.decode_width(tasks.size()), seconds);
  } else if (!requests[0]->samples_on_host && tasks[0].tokens.size() == 1) {
    costs_.record_one_row(1, seconds);
  } else {
    chunk_times_.record(tasks[0].position, static_cast<int64_t>(tasks[0].tokens.size()), seconds);
  }
  count_steps(1, 0, seconds);
  return drawn;
}

void Scheduler::count_steps(int64_t steps, int64_t drafted, double seconds) {
  std::lock_guard lock(mutex_);
  stats_.steps += steps;
  stats_.drafted_tokens += drafted;
  stats_.busy_seconds += seconds;
}

// Like take(), after a call without a draft.
void Scheduler::take_plain(const std::shared_ptr<Request>& request, std::span<const int64_t> fed, const Drawn& drawn) {
  if (const auto guess = std::exchange(request->plain_guess, std::nullopt)) {
    request->drafter.acceptance(guess->first).learn(1, guess->second == drawn.token);
  }
  request->count_call(0);
  take(request, fed, drawn);
}

// Records that the tokens `fed` are in the row, and adds the token drawn after them to the answer. `was_drafted`: whether
// a draft had guessed it.
void Scheduler::take(
    const std::shared_ptr<Request>& request, std::span<const int64_t> fed, const Drawn& drawn, bool was_drafted) {
  request->row->append(fed);
  {
    std::lock_guard lock(mutex_);
    ++stats_.generated_tokens;
    stats_.accepted_tokens += was_drafted;
  }
  const bool has_room = static_cast<int64_t>(request->row->ids.size()) < program_.metadata().max_context_len;
  request->take(drawn, has_room, was_drafted);
  if (request->is_over()) {
    leave(request, /*is_valid=*/true);
  }
}

void Scheduler::end(const std::shared_ptr<Request>& request, executorch_mlx_finish reason) {
  request->end(reason);
  leave(request, /*is_valid=*/true);
}

// Releases the row of a request that is over. `is_valid`: whether the row holds the tokens that it should.
void Scheduler::leave(const std::shared_ptr<Request>& request, bool is_valid) {
  const auto info = request->info();
  const bool had_row = request->row != nullptr;
  if (guesser_) {
    guesser_->release(*request);
  }
  if (had_row) {
    rows_.release(*request->row, is_valid);
    request->row = nullptr;
    std::erase(running_, request);
  }
  {
    std::lock_guard lock(mutex_);
    stats_.running -= had_row;
    if (!request->work) {
      ++stats_.requests;
      stats_.failed += info.finish == EXECUTORCH_MLX_FINISH_ERROR;
      stats_.prompt_tokens += had_row ? info.prompt_tokens : 0;
      stats_.reused_tokens += info.reused_tokens;
    }
  }
  request->close();
}

// Runs `body`. If it throws, the requests end with this error, and their rows are forgotten.
template <typename Body>
void Scheduler::guarded(const Requests& requests, Body&& body) {
  const auto fail = [&](executorch_mlx_status status, const char* message) {
    for (const auto& request : requests) {
      if (request->row != nullptr) {
        request->end(EXECUTORCH_MLX_FINISH_ERROR, status, message);
        leave(request, /*is_valid=*/false);
      }
    }
  };
  try {
    body();
  } catch (const EngineError& error) {
    fail(error.status, error.what());
  } catch (const std::bad_alloc& error) {
    fail(EXECUTORCH_MLX_OUT_OF_MEMORY, error.what());
  } catch (const std::exception& error) {
    fail(EXECUTORCH_MLX_FAILED, error.what());
  }
}

} // namespace executorch_mlx
