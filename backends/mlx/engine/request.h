// A request: its options, its answer so far, and its end, which other threads wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "answer_builder.h"
#include "llm_program.h"
#include "options.h"
#include "speculation.h"

namespace executorch_mlx {

using Clock = std::chrono::steady_clock;

struct Row;

class Request {
 public:
  // `options` must have passed check_options().
  Request(const LlmProgram& program, RequestOptions options);

  // Instead of generating an answer, calls `work` between two steps as soon as the row holds the prompt, again and again
  // as long as it returns true. There are no events.
  Request(const LlmProgram& program, std::vector<int64_t> prompt, std::function<bool(Row&)> work);

  // -- for any thread --------------------------------------------------------------

  void cancel() noexcept {
    cancelled_.store(true, std::memory_order_relaxed);
  }
  bool wait(double seconds);
  executorch_mlx_request_info info() const;
  // The message of an ERROR, else "".
  const char* error() const;

  // -- for the thread of the engine ------------------------------------------------

  bool is_cancelled() const {
    return cancelled_.load(std::memory_order_relaxed);
  }
  bool is_over() const {
    return is_over_;
  }

  // The first chunk begins. `reused` tokens of the prompt are in the row already.
  void begin(int64_t reused);

  // The seed of the draw that follows `ahead` draws from now.
  int64_t seed_of_draw(size_t ahead) const {
    return static_cast<int64_t>(base_seed_ + (ids.size() - options.prompt.size()) + ahead);
  }

  // The task for the next draw, or for its verification after `draft`; without tokens, position and row. Calls
  // options.allowed_tokens and shortens `draft` to what it allows. Throws EngineError if it returns false.
  RowTask draw_task(std::vector<int64_t>& draft);

  // Adds the drawn token and calls on_event. `has_room`: see AnswerBuilder::take().
  void take(const Drawn& drawn, bool has_room);

  // A call drew tokens: the ones after `drafted` guesses, of which `accepted` were right.
  void count_call(int64_t drafted, int64_t accepted);

  // Ends the request, with a last event. It is not over for other threads until close().
  void end(executorch_mlx_finish reason, executorch_mlx_status status = EXECUTORCH_MLX_OK, std::string error = "");

  void close();

  // No callback is called any more.
  void detach();

  const RequestOptions options;
  const std::function<bool(Row&)> work; // empty: generates an answer
  const bool samples_on_host;
  std::vector<int64_t> ids; // prompt and answer
  Row* row = nullptr;
  Row* draft_row = nullptr; // of the draft model
  // Whether the next token can be drawn: the row holds all of `ids` but the last one.
  bool is_decoding = false;
  Drafter drafter;
  // In a plain step: the level and the first token of the draft that there could have been.
  std::optional<std::pair<size_t, int64_t>> plain_guess;

 private:
  Request(
      const LlmProgram& program, RequestOptions options, std::function<bool(Row&)> work, bool samples_on_host);
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

  // Lock-free, so that a signal handler may set it.
  std::atomic<bool> cancelled_ = false;
  static_assert(std::atomic<bool>::is_always_lock_free);

  mutable std::mutex mutex_; // guards the rest
  std::condition_variable ended_;
  bool has_ended_ = false;
  executorch_mlx_request_info info_ = {};
  std::string error_;
};

} // namespace executorch_mlx
