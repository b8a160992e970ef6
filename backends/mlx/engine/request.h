// A request: its options, its answer so far, and its end, which other threads wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "adapters.h"
#include "answer_builder.h"
#include "llm_program.h"
#include "options.h"
#include "pictures.h"
#include "rows.h"
#include "speculation.h"

namespace executorch_mlx::engine {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Request {
 public:
  // `options` must have passed check_options().
  Request(const LlmProgram& program, RequestOptions options);

  // A request without an answer and without events. When the row holds the prompt, it calls `work` between two steps,
  // repeatedly until `work` returns false. `yields`: between two calls, other prompts may be read, and the row may be
  // given to another request for a while. The row holds the same tokens again before the next call.
  Request(const LlmProgram& program, std::vector<int64_t> prompt, std::function<bool(Row&)> work, bool yields = false);

  // -- for any thread --------------------------------------------------------------

  void cancel() noexcept {
    cancelled_ = true;
    ++cancel_calls_;
  }
  // The number of calls of cancel() for all requests so far. If it has not changed, no request was cancelled.
  static uint64_t cancel_calls() { return cancel_calls_; }
  bool wait(double seconds);
  executorch_mlx_request_info info() const;
  // Returns the error message if the finish reason is ERROR, else "".
  const char* error() const;

  // -- for the thread of the engine ------------------------------------------------

  bool is_cancelled() const { return cancelled_; }
  bool is_over() const { return is_over_; }
  bool is_stop_id(int64_t token) const { return answer_.is_stop_id(token); }
  // Whether the next draw has a mask of allowed tokens.
  bool needs_mask() const;

  // What the contents of its row depend on besides the tokens.
  Conditions conditions() const { return {options.samples.get(), adapter == nullptr ? 0 : adapter->id}; }

  // Records that the request has a row, which holds `reused` tokens of the prompt already.
  void begin(int64_t reused);

  // Whether the request has read its prompt, and its work goes on.
  bool is_working() const;

  // Returns the seed of the draw after the next `ahead` draws.
  int64_t seed_of_draw(size_t ahead) const {
    return static_cast<int64_t>(base_seed_ + (ids.size() - options.prompt.size()) + ahead);
  }

  // Returns the task that draws the next token and, with a `draft`, the token after each draft token. The caller sets
  // the task's tokens, position and row. Calls the callback options.allowed_tokens, and cuts the draft before the first
  // token that the callback does not allow. Throws EngineError if the callback returns false for the next token.
  RowTask draw_task(std::vector<int64_t>& draft);

  // Adds the drawn token and calls on_event. `has_room`: see AnswerBuilder::take(). `was_drafted`: whether a draft had
  // guessed the token.
  void take(const Drawn& drawn, bool has_room, bool was_drafted);

  // The tokens of the vocabulary for the ids, which are those of pictures in part.
  std::vector<int64_t> shown_ids() const;

  // Counts a call that drew tokens. It checked `drafted` draft tokens.
  void count_call(int64_t drafted);

  // Ends the request, with a last event. It is not over for other threads until close().
  void end(executorch_mlx_finish reason, executorch_mlx_status status = EXECUTORCH_MLX_OK, std::string error = "");

  // Ends the wait of other threads.
  void close();

  // Removes the callbacks: none is called any more.
  void detach();

  const RequestOptions options;
  const std::function<bool(Row&)> work; // empty: the request generates an answer
  const bool yields;
  const bool samples_on_host;
  std::unique_ptr<PromptPictures> pictures; // null: none
  std::shared_ptr<const Adapter> adapter; // until the request has ended; null: none
  double turn_seconds = 0; // of the work, since the request has its row
  std::vector<int64_t> ids; // prompt and answer
  Row* row = nullptr;
  Row* draft_row = nullptr; // of the draft model
  // Whether the next token can be drawn: the row holds all of `ids` but the last one.
  bool is_decoding = false;
  LookupDrafter lookup_drafter;
  // If the lookup found a draft that does not pay: its Draft::level and first token. The next token drawn shows whether
  // this token was right.
  std::optional<std::pair<size_t, int64_t>> plain_guess;

 private:
  Request(const LlmProgram& program, RequestOptions options, std::function<bool(Row&)> work, bool yields,
      bool samples_on_host);
  bool has_speech_rules() const;
  bool send(int64_t token, const Piece& piece, const Drawn* drawn);
  void finish(int64_t token, const Piece& piece, const Drawn* drawn, executorch_mlx_status status, std::string error);

  const LlmProgram& program_;
  AnswerBuilder answer_;
  executorch_mlx_on_event on_event_;
  executorch_mlx_allowed_tokens allowed_tokens_;
  std::vector<int32_t> masks_;
  uint64_t base_seed_ = 0; // of step 0; unsigned, so that base_seed_ + step can wrap around
  bool is_over_ = false;
  Clock::time_point submitted_ = Clock::now(), began_, first_token_;

  // Lock-free, so that a signal handler may set them.
  std::atomic<bool> cancelled_ = false;
  inline static std::atomic<uint64_t> cancel_calls_ = 0;
  static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free);

  mutable std::mutex mutex_; // guards the members below
  std::condition_variable ended_;
  bool has_ended_ = false;
  executorch_mlx_request_info info_ = {};
  std::string error_;
};

} // namespace executorch_mlx::engine
