#include "request.h"

#include <algorithm>
#include <random>

#include "check.h"
#include "rows.h"
#include "token_mask.h"

namespace executorch_mlx::engine {

namespace {

double seconds_between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

// Not negative, because a number without a sign is easier to type.
int64_t random_seed() {
  std::random_device source;
  const uint64_t bits = (static_cast<uint64_t>(source()) << 32) | source();
  return static_cast<int64_t>(bits >> 1);
}

bool needs_host(const LlmProgram& program, const RequestOptions& options) {
  return !program.metadata().has_head || program.unsupported_parameter(options) != nullptr;
}

} // namespace

Request::Request(const LlmProgram& program, RequestOptions given)
    : Request(program, given, {}, false, needs_host(program, given)) {
  if (samples_on_host || program.metadata().takes_seed) {
    info_.has_seed = true;
    info_.seed = options.seed ? *options.seed : random_seed();
    base_seed_ = static_cast<uint64_t>(info_.seed);
  }
}

Request::Request(const LlmProgram& program, std::vector<int64_t> prompt, std::function<bool(Row&)> work, bool yields)
    : Request(program, RequestOptions{.prompt = std::move(prompt)}, std::move(work), yields,
          !program.metadata().has_head) {}

Request::Request(
    const LlmProgram& program, RequestOptions given, std::function<bool(Row&)> work, bool yields, bool samples_on_host)
    : options(std::move(given)),
      work(std::move(work)),
      yields(yields),
      samples_on_host(samples_on_host),
      ids(content_ids(options)),
      program_(program),
      answer_(program, options),
      on_event_(options.on_event),
      allowed_tokens_(options.allowed_tokens) {
  if (options.pictures != nullptr) {
    pictures = std::make_unique<PromptPictures>(options);
  }
  info_.stop_id = -1;
  info_.prompt_tokens = static_cast<int64_t>(ids.size());
}

std::vector<int64_t> Request::shown_ids() const {
  std::vector<int64_t> result = ids;
  if (pictures != nullptr) {
    pictures->show_tokens(result);
  }
  return result;
}

bool Request::wait(double seconds) {
  constexpr double kForever = 1e9;
  std::unique_lock lock(mutex_);
  const auto has_ended = [this] { return has_ended_; };
  if (!(0 <= seconds && seconds <= kForever)) {
    ended_.wait(lock, has_ended);
    return true;
  }
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds), has_ended);
}

executorch_mlx_request_info Request::info() const {
  std::lock_guard lock(mutex_);
  return info_;
}

const char* Request::error() const {
  std::lock_guard lock(mutex_);
  return info_.finish == EXECUTORCH_MLX_FINISH_ERROR ? error_.c_str() : ""; // the string does not change any more
}

void Request::begin(int64_t reused) {
  began_ = Clock::now();
  std::lock_guard lock(mutex_);
  info_.reused_tokens = reused;
  info_.queue_seconds = seconds_between(submitted_, began_);
}

bool Request::is_working() const { return work && row != nullptr && row->ids.size() >= ids.size(); }

bool Request::has_speech_rules() const { return program_.metadata().speech.is_speech() && !options.allow_suppressed; }

bool Request::needs_mask() const {
  return allowed_tokens_ != nullptr || has_speech_rules() ||
      !answer_.prevented_stop_ids(answer_.tokens().size()).empty();
}

RowTask Request::draw_task(std::vector<int64_t>& draft) {
  RowTask task;
  task.sampling = &options.sampling;
  task.seed = seed_of_draw(0);
  task.wants_logprobs = options.logprobs >= 0;
  const LlmMetadata& meta = program_.metadata();
  task.timestamps = options.timestamps;
  if (!needs_mask()) {
    return task;
  }
  const size_t words = mask_words(meta.vocab_size);
  std::vector<int64_t> answer = answer_.tokens();
  masks_.assign(words, kAllTokens);
  const auto fill_mask = [&](size_t i) {
    const std::span<int32_t> mask = std::span(masks_).subspan(i * words, words);
    if (has_speech_rules()) {
      const int64_t stop_id = meta.eos_ids.empty() ? -1 : meta.eos_ids[0];
      mask_speech_tokens(meta.speech, answer, options.timestamps, stop_id, meta.vocab_size, mask);
    }
    try {
      if (allowed_tokens_ != nullptr &&
          !allowed_tokens_(options.user_data, answer.data(), answer.size(), mask.data(), words)) {
        return false;
      }
    } catch (...) { // from a callback in C++
      return false;
    }
    for (const int64_t id : answer_.prevented_stop_ids(answer.size())) {
      forbid(mask, id);
    }
    return true;
  };
  const auto admits_token = [&](size_t i) {
    return allows_any(std::span(masks_).subspan(i * words, words), meta.vocab_size);
  };
  check_argument(fill_mask(0), "allowed_tokens: the callback returned false");
  check_argument(admits_token(0), "allowed_tokens: got a mask that admits no token",
      answer_.prevented_stop_ids(answer.size()).empty() ? "" : " but stop ids, which min_new_tokens prevents");
  // A draft ends before the first token that its mask does not allow, so that the callback sees possible answers only.
  for (size_t i = 0; i < draft.size(); ++i) {
    const int64_t token = draft[i];
    const bool may_follow = is_allowed(std::span(masks_).subspan(i * words, words), token);
    masks_.resize((i + 2) * words, kAllTokens);
    answer.push_back(token);
    if (!may_follow || !fill_mask(i + 1) || !admits_token(i + 1)) {
      draft.resize(i);
    }
  }
  masks_.resize((draft.size() + 1) * words);
  task.allowed_tokens = masks_;
  return task;
}

// Calls on_event, and returns whether to continue.
bool Request::send(int64_t token, const Piece& piece, const Drawn* drawn) {
  if (on_event_ == nullptr) {
    return true;
  }
  executorch_mlx_event event = {};
  event.size = sizeof(event);
  event.token = token;
  event.text = piece.text.c_str();
  event.text_length = piece.text.size();
  event.finish = piece.finish;
  event.stop_index = piece.stop_index;
  if (drawn != nullptr && options.logprobs >= 0) {
    event.logprob = drawn->logprob;
    event.top_count = std::min<int64_t>(options.logprobs, static_cast<int64_t>(drawn->top_tokens.size()));
    event.top_tokens = drawn->top_tokens.data();
    event.top_logprobs = drawn->top_logprobs.data();
  }
  try {
    return on_event_(options.user_data, &event);
  } catch (...) { // from a callback in C++
    return false;
  }
}

void Request::take(const Drawn& drawn, bool has_room, bool was_drafted) {
  const auto now = Clock::now();
  const bool is_stop_id = answer_.is_stop_id(drawn.token);
  {
    std::lock_guard lock(mutex_);
    if (info_.generated_tokens++ == 0) {
      first_token_ = now;
      info_.prompt_seconds = seconds_between(began_, now);
    }
    info_.accepted_tokens += was_drafted;
    info_.generation_seconds = seconds_between(first_token_, now);
    info_.stop_id = is_stop_id ? drawn.token : -1;
  }
  ids.push_back(drawn.token);
  const Piece piece = answer_.take(drawn.token, has_room);
  if (piece.finish != EXECUTORCH_MLX_RUNNING) {
    finish(drawn.token, piece, &drawn, EXECUTORCH_MLX_OK, "");
  } else if (!send(drawn.token, piece, &drawn)) {
    end(EXECUTORCH_MLX_CANCELLED);
  }
}

void Request::count_call(int64_t drafted) {
  std::lock_guard lock(mutex_);
  ++info_.calls;
  info_.drafted_tokens += drafted;
}

void Request::end(executorch_mlx_finish reason, executorch_mlx_status status, std::string error) {
  if (!is_over_) {
    const bool failed = reason == EXECUTORCH_MLX_FINISH_ERROR;
    finish(-1, failed ? Piece{.finish = reason} : answer_.end(reason), nullptr, status, error);
  }
}

// Sends the last event. The callback can already read info() and error().
void Request::finish(
    int64_t token, const Piece& piece, const Drawn* drawn, executorch_mlx_status status, std::string error) {
  is_over_ = true;
  {
    std::lock_guard lock(mutex_);
    info_.finish = piece.finish;
    info_.status = status;
    error_ = std::move(error);
  }
  send(token, piece, drawn);
}

void Request::close() {
  std::lock_guard lock(mutex_);
  has_ended_ = true;
  ended_.notify_all();
}

void Request::detach() {
  on_event_ = nullptr;
  allowed_tokens_ = nullptr;
}

} // namespace executorch_mlx::engine
