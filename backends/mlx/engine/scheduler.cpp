#include "scheduler.h"

#include <executorch_mlx/delegate.h>

#include <algorithm>
#include <limits>
#include <new>
#include <utility>

#include "fork_check.h"
#include "host_sampler.h"

namespace executorch_mlx::engine {

namespace {

// The largest chunk on a CPU, unless an option says otherwise. A larger one would not make the matrix products faster,
// and would need more memory for the attention scores. On a GPU, a chunk is as large as the program permits.
constexpr int64_t kCpuChunk = 512;
constexpr double kCpuChunkSeconds = 0.25;
constexpr double kAnyTime = std::numeric_limits<double>::infinity();
constexpr int64_t kRaiseLimitsAfter = 1024; // steps
constexpr double kTurnSeconds = 0.5; // the longest time for which a request that yields keeps its row while others wait

int64_t largest_chunk(const LlmProgram& program, const executorch_mlx_engine_options& options) {
  const int64_t most = program.metadata().max_seq_len;
  return std::min(options.chunk > 0 ? options.chunk : program.runs_on_cpu() ? kCpuChunk : most, most);
}

} // namespace

Scheduler::Scheduler(LlmProgram& program, LlmProgram* draft, const executorch_mlx_engine_options& options)
    : program_(program),
      options_(options),
      rows_(program, options.reuse_prompts),
      adapters_(program),
      overlaps_((options.overlap < 0 ? !program.runs_on_cpu() : options.overlap > 0) && program.can_defer()),
      max_rows_(1, program.metadata().rows),
      max_chunk_(1, largest_chunk(program, options)) {
  check_not_forked();
  // Adding a request must not fail for lack of memory: the request has left the queue then, and would be lost.
  running_.reserve(static_cast<size_t>(program.metadata().rows));
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
  parked_.notify_all();
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
    const bool has_room =
        options_.queue_limit == 0 || request->work || static_cast<int64_t>(queue_.size()) - free < options_.queue_limit;
    check(has_room, EXECUTORCH_MLX_BUSY, "the queue is full: ", options_.queue_limit, " requests are waiting");
    const int32_t priority = request->options.priority;
    queue_.emplace(priority, request);
  }
  if (request->is_cancelled()) {
    request->cancel(); // again: end_cancelled() may have looked at the queue before
  }
  changed_.notify_one();
}

void Scheduler::run(
    std::vector<int64_t> prompt, std::shared_ptr<const Adapter> adapter, std::function<bool(Row&)> work) {
  check_argument(!is_on_thread(), "engine: a callback must not wait for it");
  const auto request = std::make_shared<Request>(program_, std::move(prompt), std::move(work));
  request->adapter = std::move(adapter);
  submit(request);
  wait(*request);
}

void Scheduler::call_between_steps(std::function<void()> body) {
  check_argument(!is_on_thread(), "engine: a callback must not wait for it");
  check_not_forked();
  std::packaged_task<void()> call(std::move(body));
  auto result = call.get_future();
  {
    std::lock_guard lock(mutex_);
    check(!is_closing_, EXECUTORCH_MLX_FAILED, "engine: it is closed");
    calls_.push_back(std::move(call));
  }
  changed_.notify_one();
  result.get();
}

// Runs the calls of call_between_steps().
void Scheduler::run_calls() {
  std::vector<std::packaged_task<void()>> calls;
  {
    std::lock_guard lock(mutex_);
    calls.swap(calls_);
  }
  if (!calls.empty()) {
    finish_pending();
  }
  for (auto& call : calls) {
    call(); // its future takes an exception
    recover();
  }
}

void Scheduler::wait(Request& request) const {
  request.wait(-1);
  const auto info = request.info();
  check(info.finish != EXECUTORCH_MLX_CANCELLED, EXECUTORCH_MLX_FAILED, "engine: it is closed");
  check(info.finish != EXECUTORCH_MLX_FINISH_ERROR, info.status, request.error());
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
  if (program_.has_low_priority()) {
    executorch_mlx_lower_thread_priority();
  }
  while (wait_for_work()) {
    guarded(running_, [this] { // the work between calls may lack memory, too
      recover(); // if there was no memory before
      raise_limits();
      run_calls();
      read_prompts();
      step();
    });
  }
  while (!running_.empty()) {
    end(std::shared_ptr(running_.front()), EXECUTORCH_MLX_CANCELLED);
  }
  finish_pending();
  run_calls(); // others may wait for them
  std::unique_lock lock(mutex_);
  while (!queue_.empty()) {
    const auto request = std::move(queue_.begin()->second);
    queue_.erase(queue_.begin());
    lock.unlock();
    end(request, EXECUTORCH_MLX_CANCELLED);
    lock.lock();
  }
}

// Looks at the requests only after a call of cancel(): thousands may be waiting.
void Scheduler::end_cancelled() {
  const uint64_t calls = Request::cancel_calls();
  if (calls == seen_cancel_calls_) {
    return;
  }
  Requests cancelled;
  // Each flag is read once, because other threads may set it at any time.
  const auto take_cancelled = [&](const auto& request) {
    return request->is_cancelled() && (cancelled.push_back(request), true);
  };
  {
    std::lock_guard lock(mutex_);
    cancelled.reserve(running_.size() + queue_.size()); // a request that has left the queue must not get lost
    std::for_each(running_.begin(), running_.end(), take_cancelled);
    std::erase_if(queue_, [&](const auto& entry) { return take_cancelled(entry.second); });
  }
  seen_cancel_calls_ = calls;
  for (const auto& request : cancelled) {
    end(request, EXECUTORCH_MLX_CANCELLED);
  }
  if (running_.empty()) {
    finish_pending();
  }
}

Scheduler::Requests::iterator Scheduler::find_prompt() {
  return std::find_if(running_.begin(), running_.end(), [](const auto& request) { return !request->is_decoding; });
}

// From time to time, raises the limits of calls that did not fit into memory: memory may have been freed since. A model
// that has failed to guess tokens is tried again, too. A prompt keeps the limits with which it began. Otherwise, a row
// that cannot go back could fail and begin again without end.
void Scheduler::raise_limits() {
  if (find_prompt() == running_.end() && ++steps_since_limit_ >= kRaiseLimitsAfter) {
    steps_since_limit_ = 0;
    for (auto* limit : {&max_rows_, &max_chunk_, &max_draft_}) {
      limit->raise();
    }
    if (guesser_) {
      guesser_->try_again();
    }
  }
}

// Reads prompts between two steps: a chunk of a long one, or several short ones, whose answers then run together. The
// running answers wait for about chunk_seconds(), and for fewer tokens than two chunks have.
void Scheduler::read_prompts() {
  const auto begin = Clock::now();
  const double seconds = chunk_seconds();
  double used = 0;
  int64_t tokens = 0;
  for (int64_t i = 0; i < program_.metadata().rows; ++i) {
    end_cancelled();
    begin_next();
    const int64_t read = advance_prompt(seconds - used);
    tokens += read;
    used = seconds_since(begin);
    const bool has_room = tokens < max_chunk_.value() && used < seconds / 2;
    if (read == 0 || find_prompt() != running_.end() || !has_room) {
      return;
    }
  }
}

// Gives a row to the first of the waiting requests with the highest priority, unless a prompt is being processed.
void Scheduler::begin_next() {
  const auto is_processed = [](const auto& r) { return !r->is_decoding && !(r->yields && r->is_working()); };
  if (std::any_of(running_.begin(), running_.end(), is_processed) || !(rows_.has_free() || yield_row())) {
    return;
  }
  std::shared_ptr<Request> request;
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty()) {
      return;
    }
    request = std::move(queue_.begin()->second);
    queue_.erase(queue_.begin());
    ++stats_.running;
  }
  if (running_.empty()) {
    guarded({request}, [&] { program_.load(); }); // after release_memory(); the first call reports an error
  }
  if (rows_.has_beginning(request->ids, request->conditions())) {
    finish_pending(); // a row may be copied
  }
  // A call needs at least one token, so that the last one of a prompt is never reused for an answer.
  const auto length = static_cast<int64_t>(request->ids.size());
  Row* row = nullptr;
  try {
    const int64_t most = request->pictures != nullptr ? request->pictures->reusable(program_.metadata(), length)
        : request->work                               ? length
                                                      : length - 1;
    row = rows_.take(request->ids, most, request->conditions());
  } catch (const std::bad_alloc&) {
    row = rows_.take({}, 0); // without reuse, which needs memory
  }
  row->request = request;
  row->adapter = request->conditions().adapter;
  row->adapter_slot = request->adapter == nullptr ? 0 : request->adapter->slot;
  request->row = row;
  running_.push_back(request);
  request->begin(static_cast<int64_t>(row->ids.size()));
  if (request->adapter != nullptr && !adapters_.is_written()) {
    fail(request, EXECUTORCH_MLX_OUT_OF_MEMORY, "adapter: there is no memory to write it again after a failed call");
  }
}

// Takes the row from a request that yields and has had its turn, if another request waits for a row. The request waits
// behind it. It reads its tokens again when it gets a row, unless a row still holds them. Returns whether a row is
// free.
bool Scheduler::yield_row() {
  const double turn = std::min(chunk_seconds(), kTurnSeconds);
  const auto found = std::find_if(running_.begin(), running_.end(),
      [&](const auto& request) { return request->yields && request->is_working() && request->turn_seconds >= turn; });
  if (found == running_.end()) {
    return false;
  }
  const auto request = *found;
  {
    std::lock_guard lock(mutex_);
    if (queue_.empty() || queue_.begin()->first < request->options.priority) {
      return false;
    }
    queue_.emplace(request->options.priority, request);
    --stats_.running;
  }
  request->turn_seconds = 0;
  request->ids = request->row->ids;
  rows_.release(*request->row, /*is_valid=*/true);
  request->row = nullptr;
  running_.erase(found);
  return true;
}

// Calls the work of a request once.
void Scheduler::work(const std::shared_ptr<Request>& request) {
  const auto begin = Clock::now();
  if (!request->work(*request->row)) {
    end(request, EXECUTORCH_MLX_LENGTH);
  } else if (request->yields) { // the next prompt has its turn
    request->turn_seconds += seconds_since(begin);
    const auto found = std::find(running_.begin(), running_.end(), request);
    std::rotate(found, found + 1, running_.end());
  }
  count_steps(0, 0, seconds_since(begin));
  recover(); // the work may have gone on after a failed call
}

// Feeds the next chunk of a prompt, which should take at most `seconds` while answers run. The last chunk of the prompt
// of an answer draws the first token. Returns the size of the chunk; 0 if there is none.
int64_t Scheduler::advance_prompt(double seconds) {
  const auto found = find_prompt();
  if (found == running_.end()) {
    return 0;
  }
  const auto request = *found;
  int64_t size = 0;
  const auto has_pictures = [&] {
    const auto begin = static_cast<int64_t>(request->row->ids.size());
    return request->pictures != nullptr && request->pictures->overlap(begin, std::ssize(request->ids) - begin);
  };
  const bool overlaps = can_overlap(*request) && !request->work && seconds == kAnyTime && !has_pictures();
  if (!overlaps) {
    finish_pending();
  }
  guarded({request}, [&] {
    encode(*request);
    // The work may add tokens to the row.
    const auto rest = std::span(request->ids).subspan(std::min(request->ids.size(), request->row->ids.size()));
    const auto begin = static_cast<int64_t>(request->row->ids.size());
    size = chunk_size(begin, static_cast<int64_t>(rest.size()), seconds);
    if (request->pictures != nullptr) {
      size = request->pictures->chunk_size(program_.metadata(), begin, size);
    }
    const auto chunk = rest.first(static_cast<size_t>(size));
    if (rest.empty()) {
      work(request);
    } else if (request->work || chunk.size() < rest.size()) {
      const uint64_t resets = resets_;
      finish_pending();
      if (resets != resets_) {
        return; // the row is empty now
      }
      fits({request}, max_chunk_, size, [&] { feed(*request, chunk); });
    } else if (overlaps) {
      request->is_decoding = true;
      fits({request}, max_chunk_, size, [&] { submit_prompt(request); });
    } else {
      request->is_decoding = true;
      draw({&request, 1});
    }
  });
  return size;
}

// How long a chunk of a prompt should take while answers run. On a GPU, the last bits of a token's logits depend on the
// size of its chunk. There, the size depends on times only if the option asks for it.
double Scheduler::chunk_seconds() const {
  return options_.chunk_seconds > 0 ? options_.chunk_seconds : program_.runs_on_cpu() ? kCpuChunkSeconds : kAnyTime;
}

// The size of the next chunk of a prompt of which `rest` tokens, from `position`, are not yet read. While answers run,
// the chunk should take `seconds`.
int64_t Scheduler::chunk_size(int64_t position, int64_t rest, double seconds) const {
  const int64_t limit = max_chunk_.value();
  if (running_.size() == 1 || seconds == kAnyTime) {
    return std::min(limit, rest);
  }
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
  Row& row = *request.row;
  RowTask task = {.tokens = tokens,
      .position = static_cast<int64_t>(row.ids.size()),
      .row = row.index,
      .adapter = row.adapter_slot};
  if (request.pictures != nullptr) {
    request.pictures->prepare(program_, task);
  }
  row.expect(task);
  if (request.samples_on_host) {
    program_.logits({&task, 1});
  } else {
    program_.draw({&task, 1});
  }
  row.append(tokens);
  const double seconds = seconds_since(begin);
  chunk_times_.record(task.position, static_cast<int64_t>(tokens.size()), seconds);
  count_steps(0, 0, seconds);
}

// Draws the next token of every running answer. An answer for which speculation pays may get several tokens.
void Scheduler::step() {
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
  const auto max_rows = static_cast<size_t>(max_rows_.value());
  const size_t per_call = one_by_one ? 1 : max_rows;
  for (size_t i = 0; i < head.size(); i += per_call) {
    Requests requests(head.begin() + i, head.begin() + std::min(i + per_call, head.size()));
    std::erase_if(requests, [](const auto& request) { return !request->is_decoding; }); // after a failed call
    if (requests.empty()) {
      continue;
    }
    if (submits_ahead) {
      guarded(requests,
          [&] { fits(requests, max_rows_, std::ssize(requests), [&] { pending_.push_back(submit(requests)); }); });
    } else {
      draw(requests);
    }
  }
  for (auto& [request, draft] : drafts) {
    verify(request, std::move(draft));
  }
  const size_t per_host_call = program_.has_logits_of_rows() ? max_rows : 1;
  for (size_t i = 0; i < host.size(); i += per_host_call) {
    draw(std::span(host).subspan(i, std::min(per_host_call, host.size() - i)));
  }
}

// If a failed call has left the buffers of the program undefined, resets them and writes the adapters again. Without
// memory for this, the requests that need it end with this error, and the next call tries again.
void Scheduler::recover() {
  const auto run = [&](auto work, auto needs_it) {
    try {
      work();
    } catch (const EngineError& error) {
      for (const auto& request : Requests(running_)) {
        if (needs_it(*request)) {
          fail(request, error.status, error.what());
        }
      }
    }
  };
  if (program_.is_undefined()) {
    run([&] { reset(); }, [](const Request&) { return true; });
  }
  if (!program_.is_undefined() && !adapters_.is_written()) {
    run([&] { adapters_.restore(); }, [](const Request& request) { return request.adapter != nullptr; });
  }
}

// Resets the buffers of the program. All rows are empty then: requests read their prompts and answers again, and draw
// the same tokens.
void Scheduler::reset() {
  pending_.clear(); // the requests draw these tokens again
  advanced_.reset();
  ++resets_;
  for (const auto& request : running_) {
    if (request->work && request->row->ids.size() > request->ids.size()) {
      request->ids = request->row->ids; // with the tokens that the work has added
    }
    request->is_decoding = false;
  }
  rows_.forget();
  adapters_.forget();
  program_.reset();
}

// Frees the memory of the methods that only drafts and scores need, and makes no drafts until raise_limits(). Returns
// whether there was such a method.
bool Scheduler::free_memory() {
  max_draft_.set_to_smallest();
  rows_.forget_mtp();
  return program_.unload_optional_methods();
}

// After a call that did not fit into memory: a row that has forgotten its tokens reads prompt and answer again.
void Scheduler::prepare_retry(Request& request) {
  if (request.row != nullptr) {
    request.row->go_back(program_.metadata());
    request.is_decoding = request.is_decoding && request.row->ids.size() + 1 == request.ids.size();
  }
}

// Draws the next token of each request, in one call.
void Scheduler::draw(std::span<const std::shared_ptr<Request>> requests) {
  Requests ready;
  std::vector<RowTask> tasks;
  for (const auto& request : requests) {
    if (!request->is_decoding) {
      continue; // another call of this step has failed
    }
    guarded({request}, [&] {
      std::vector<int64_t> no_draft;
      RowTask task = request->draw_task(no_draft);
      task.tokens = std::span(request->ids).subspan(request->row->ids.size());
      task.position = static_cast<int64_t>(request->row->ids.size());
      task.row = request->row->index;
      task.adapter = request->row->adapter_slot;
      if (request->pictures != nullptr) {
        request->pictures->prepare(program_, task);
      }
      request->row->expect(task);
      tasks.push_back(task);
      ready.push_back(request);
    });
  }
  if (ready.empty()) {
    return;
  }
  guarded(ready, [&] {
    std::vector<Drawn> drawn;
    const bool is_chunk = ready.size() == 1; // a chunk of a prompt, or one token
    CallLimit& limit = is_chunk ? max_chunk_ : max_rows_;
    const auto size = is_chunk ? std::ssize(tasks[0].tokens) : std::ssize(ready);
    fits(ready, limit, size, [&] { drawn = run_tasks(ready, tasks); });
    for (size_t i = 0; i < drawn.size(); ++i) {
      take_plain(ready[i], std::span(ready[i]->ids).subspan(ready[i]->row->ids.size()), drawn[i]);
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
      const std::vector<int64_t> shown = requests[i]->shown_ids();
      std::span<const int64_t> history = shown;
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
    request->lookup_drafter.acceptance(guess->first).learn(1, guess->second == drawn.token);
  }
  request->count_call(0);
  take(request, fed, drawn);
}

// Records that the tokens `fed` are in the row, and adds the token drawn after them to the answer. `was_drafted`:
// whether a draft had guessed it.
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
  if (request->pictures != nullptr) {
    request->pictures->forget(); // the prompt is read
  }
  if (request->is_over()) {
    leave(request, /*is_valid=*/true);
  }
}

void Scheduler::end(const std::shared_ptr<Request>& request, executorch_mlx_finish reason) {
  try {
    request->end(reason);
  } catch (const std::bad_alloc& error) { // no room for the rest of the text
    return fail(request, EXECUTORCH_MLX_OUT_OF_MEMORY, error.what());
  }
  leave(request, /*is_valid=*/true);
}

// Ends a request with an error, and forgets its row.
void Scheduler::fail(const std::shared_ptr<Request>& request, executorch_mlx_status status, const char* message) {
  try {
    request->end(EXECUTORCH_MLX_FINISH_ERROR, status, message);
  } catch (const std::bad_alloc& error) { // no room for the message; that of std::bad_alloc needs no memory
    request->end(EXECUTORCH_MLX_FINISH_ERROR, EXECUTORCH_MLX_OUT_OF_MEMORY, error.what());
  }
  leave(request, /*is_valid=*/false);
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
  request->adapter.reset();
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

} // namespace executorch_mlx::engine
