// The engine: a thread that gives rows to requests and runs the program.
//
// Between two steps, requests join and leave. A step adds one token to every running answer, or several with
// speculation. While answers run, the chunks of a new prompt alternate with steps.
//
// With overlap, a step is submitted before the host has read the tokens of the previous step: the new step takes them
// on the device. Host and device then work at the same time. If a token ends its request, the draw after it is
// discarded. The discarded draw has written a position behind the answer, which is overwritten when the row is used
// again. The last chunk of a prompt, which draws the first token of the answer, is submitted in the same way.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "adapters.h"
#include "call_limit.h"
#include "check.h"
#include "chunk_times.h"
#include "draft_model.h"
#include "llm_program.h"
#include "request.h"
#include "rows.h"
#include "speculation.h"

namespace executorch_mlx::engine {

class Scheduler {
 public:
  // Starts the thread. `draft` guesses tokens, and may be null. `options` as in executorch_mlx.h.
  Scheduler(LlmProgram& program, LlmProgram* draft, const executorch_mlx_engine_options& options);

  ~Scheduler() { close(); }

  // Cancels all requests and ends the thread. Later requests are refused. Must not be called on the thread.
  void close();

  // Queues a request. Throws EngineError: with BUSY if the queue is full, and with FAILED after close().
  void submit(std::shared_ptr<Request> request);

  // Waits until a request without an answer has ended. Throws EngineError if it fails.
  void wait(Request& request) const;

  // Reads `prompt` into a row, then calls `work` between steps until it returns false. Waits until this is done.
  // `adapter` may be null. Throws EngineError if it fails.
  void run(std::vector<int64_t> prompt, std::shared_ptr<const Adapter> adapter, std::function<bool(Row&)> work);

  // Calls `body` on the thread, before the next step, and waits for its end. Throws what it throws.
  void call_between_steps(std::function<void()> body);

  Adapters& adapters() { return adapters_; }

  // As executorch_mlx_engine_clone(), _suspend(), _resume() and _release_memory(). Throw EngineError.
  void clone(std::vector<int64_t> ids);
  void suspend();
  void resume();
  void release_memory();

  executorch_mlx_engine_stats stats() const;

  std::thread::id thread_id() const { return thread_id_; }
  // How often the program was reset after failed calls. To be called on the thread.
  uint64_t resets() const { return resets_; }
  bool is_on_thread() const { return std::this_thread::get_id() == thread_id_; }

 private:
  using Requests = std::vector<std::shared_ptr<Request>>;

  // A submitted call that draws a token for each request.
  struct PendingStep {
    Requests requests; // some may be over: their tokens are discarded
    PendingDraw draw;
    Clock::time_point submitted;
    uint64_t resets; // resets_ at this time
  };

  // -- the thread: requests join, their prompts are read, a step is made, requests leave
  void loop();
  bool wait_for_work();
  void park(std::unique_lock<std::mutex>& lock);
  void end_cancelled();
  void run_calls();
  void read_prompts();
  void begin_next();
  bool yield_row();
  void work(const std::shared_ptr<Request>& request);
  Requests::iterator find_prompt();
  int64_t advance_prompt(double seconds);
  void encode(Request& request);
  void place(RowTask& task, Request& request, std::span<const int64_t> tokens, size_t position);
  void feed(Request& request, std::span<const int64_t> tokens);
  double chunk_seconds() const;
  int64_t chunk_size(int64_t position, int64_t rest, double seconds) const;
  void step();
  void draw(std::span<const std::shared_ptr<Request>> requests);
  std::vector<Drawn> run_tasks(std::span<const std::shared_ptr<Request>> requests, std::span<const RowTask> tasks);
  void take_plain(const std::shared_ptr<Request>& request, std::span<const int64_t> fed, const Drawn& drawn);
  void take(const std::shared_ptr<Request>& request, std::span<const int64_t> fed, const Drawn& drawn,
      bool was_drafted = false);
  void end(const std::shared_ptr<Request>& request, executorch_mlx_finish reason);
  void fail(const std::shared_ptr<Request>& request, executorch_mlx_status status, const char* message);
  void leave(const std::shared_ptr<Request>& request, bool is_valid);
  void count_steps(int64_t steps, int64_t drafted, double seconds);

  // -- calls that fail
  template <typename Body>
  void guarded(const Requests& requests, Body&& body);
  template <typename Call>
  bool fits(const Requests& requests, CallLimit& limit, int64_t size, Call&& call);
  void recover();
  void reset();
  bool free_memory();
  void prepare_retry(Request& request);
  void raise_limits();

  // -- drafts (scheduler_drafts.cpp)
  bool prefers_single_steps(size_t running);
  int64_t model_draft_length(int64_t most, size_t running, const StepCosts::Choice& lookup);
  Draft propose(const std::shared_ptr<Request>& request, size_t running);
  Draft find_draft(const std::shared_ptr<Request>& request, size_t running);
  void verify(const std::shared_ptr<Request>& request, Draft draft);
  void rewind(Row& row, RowTask task);

  // -- overlap (scheduler_overlap.cpp)
  bool can_overlap(const Request& request) const;
  bool needs_draw_after_pending(const Request& request) const;
  bool may_follow_pending();
  void advance_pending();
  void submit_prompt(const std::shared_ptr<Request>& request);
  PendingStep submit(Requests requests, const PendingStep* source = nullptr);
  void finish(PendingStep step);
  void finish_pending();

  LlmProgram& program_;
  const executorch_mlx_engine_options options_;

  // Used only by the thread.
  Rows rows_;
  Adapters adapters_; // thread-safe, except where it says otherwise
  Requests running_; // those that have a row, in the order in which they began
  const bool overlaps_;
  std::vector<PendingStep> pending_; // the calls of one step or of a prompt, whose tokens are not read yet
  Clock::time_point finished_; // when the last pending call ended
  std::optional<Clock::time_point> advanced_; // when advance_pending() ended, if nothing ran since
  ChunkTimes chunk_times_;
  StepCosts costs_;
  std::unique_ptr<Guesser> guesser_; // null: none
  CallLimit max_rows_;
  CallLimit max_chunk_; // tokens of a prompt
  CallLimit max_draft_{0, StepCosts::kMaxDraft}; // draft tokens
  uint64_t resets_ = 0; // of the program, after failed calls
  uint64_t seen_cancel_calls_ = 0; // Request::cancel_calls() when end_cancelled() last looked at the requests
  int64_t steps_since_limit_ = 0; // since a limit was changed, without those while a prompt was read

  mutable std::mutex mutex_; // guards the members below up to is_closing_
  std::condition_variable changed_;
  // By priority, the highest first. Requests of the same priority are in the order in which they were submitted.
  std::multimap<int32_t, std::shared_ptr<Request>, std::greater<>> queue_;
  std::vector<std::packaged_task<void()>> calls_; // of call_between_steps()
  executorch_mlx_engine_stats stats_ = {};
  bool is_closing_ = false;
  bool is_suspended_ = false;
  bool is_parked_ = false; // the thread waits for resume(), and the device has no work
  std::condition_variable parked_; // is_parked_ has changed

  std::mutex closing_; // held while the thread is joined
  std::thread thread_;
  std::thread::id thread_id_;
};

// Runs `body`. If it throws, the requests end with this error, and their rows are forgotten. `requests` may be
// running_. Other requests go on: see recover().
template <typename Body>
void Scheduler::guarded(const Requests& requests, Body&& body) {
  const auto fail_all = [&](executorch_mlx_status status, const char* message) {
    for (size_t i = requests.size(); i-- > 0;) { // from the end, because those that fail leave running_
      if (const auto request = requests[i]; request->row != nullptr) {
        fail(request, status, message);
      }
    }
  };
  try {
    body();
    return;
  } catch (const EngineError& error) {
    fail_all(error.status, error.what());
  } catch (const std::bad_alloc& error) {
    fail_all(EXECUTORCH_MLX_OUT_OF_MEMORY, error.what());
  } catch (const std::exception& error) {
    fail_all(EXECUTORCH_MLX_FAILED, error.what());
  }
  recover();
}

// Makes a call for these requests, and returns whether it fitted into memory. If not, lowers the limit, so that the
// next call is smaller. If it cannot be smaller, frees memory. Throws the error if there is nothing to free. `size` is
// the size of the call to which the limit applies.
template <typename Call>
bool Scheduler::fits(const Requests& requests, CallLimit& limit, int64_t size, Call&& call) {
  try {
    call();
    return true;
  } catch (const EngineError& error) {
    if (error.status != EXECUTORCH_MLX_OUT_OF_MEMORY || !(limit.lower(size) || free_memory())) {
      throw;
    }
  }
  steps_since_limit_ = 0;
  recover();
  for (const auto& request : requests) {
    prepare_retry(*request);
  }
  return false;
}

} // namespace executorch_mlx::engine
