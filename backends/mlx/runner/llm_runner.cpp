#include <executorch_mlx/llm_runner.h>
#include <executorch_mlx/utf8_stream.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>

#include "llm_program.h"
#include "text.h"

namespace executorch_mlx {

namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kReserved = 1 << 16; // tokens; an answer without an end may be wanted

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double rate(int64_t count, double seconds) {
  return count > 0 && seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

// Not negative, so that it can be typed again without a thought.
int64_t random_seed() {
  std::random_device source;
  const uint64_t bits = (static_cast<uint64_t>(source()) << 32) | source();
  return static_cast<int64_t>(bits >> 1);
}

} // namespace

const char* to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStopId:
      return "stop id";
    case FinishReason::kMaxNewTokens:
      return "max new tokens";
    case FinishReason::kContextFull:
      return "context full";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

double Timings::prefill_tokens_per_second() const {
  return rate(prompt_tokens, prefill);
}

double Timings::decode_tokens_per_second() const {
  return rate(decoded_tokens, decode);
}

struct LlmRunner::Impl {
  Impl(const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer)
      : program(path, device, tracer) {}

  void check_ids(const char* what, std::span<const int64_t> ids) const {
    const int64_t vocab_size = program.metadata().vocab_size;
    for (const int64_t id : ids) {
      check_argument(
          0 <= id && id < vocab_size,
          what, ": id ", id, " is outside the vocabulary [0, ", vocab_size, ")");
    }
  }

  void check_prompt(std::span<const int64_t> tokens) const {
    const int64_t capacity = program.metadata().max_context_len;
    check_argument(!tokens.empty(), "prompt: empty, expected at least 1 token");
    check_argument(
        static_cast<int64_t>(tokens.size()) <= capacity - position,
        "prompt: ", tokens.size(), " tokens after ", position, " in the context are more than its ",
        capacity, " positions");
    check_ids("prompt", tokens);
  }

  // The token drawn after `tokens`; none if cancelled between two pieces.
  std::optional<int64_t> feed(std::span<const int64_t> tokens, bool cancellable) {
    const size_t piece = program.metadata().max_seq_len;
    int64_t token = 0;
    for (size_t i = 0; i < tokens.size(); i += piece) {
      if (cancellable && cancelled.load(std::memory_order_relaxed)) {
        return std::nullopt;
      }
      const auto part = tokens.subspan(i, std::min(piece, tokens.size() - i));
      token = program.call(part, position, static_cast<int64_t>(base_seed + drawn));
      position += static_cast<int64_t>(part.size());
    }
    ++drawn; // what the earlier pieces drew was of no use
    return token;
  }

  LlmProgram program;
  double load_seconds = 0;
  int64_t position = 0;
  uint64_t base_seed = 0; // unsigned: the seeds go round at the end of int64
  uint64_t drawn = 0;
  // A signal handler may store to it only if no lock is behind.
  std::atomic<bool> cancelled = false;
  static_assert(std::atomic<bool>::is_always_lock_free);
};

LlmRunner::LlmRunner(
    const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer) {
  const auto begin = Clock::now();
  impl_ = std::make_unique<Impl>(path, device, tracer);
  start({});
  impl_->load_seconds = seconds_since(begin);
}

LlmRunner::~LlmRunner() = default;

const LlmMetadata& LlmRunner::metadata() const {
  return impl_->program.metadata();
}

double LlmRunner::load_seconds() const {
  return impl_->load_seconds;
}

std::string_view LlmRunner::token_bytes(int64_t token) const {
  return impl_->program.token_bytes(token);
}

void LlmRunner::cancel() noexcept {
  impl_->cancelled.store(true, std::memory_order_relaxed);
}

int64_t LlmRunner::position() const {
  return impl_->position;
}

void LlmRunner::reset() {
  impl_->position = 0;
}

std::optional<int64_t> LlmRunner::start(const Sampling& sampling) {
  impl_->program.set_sampling(sampling);
  impl_->drawn = 0;
  if (!metadata().takes_seed) {
    return std::nullopt;
  }
  const int64_t seed = sampling.seed ? *sampling.seed : random_seed();
  impl_->base_seed = static_cast<uint64_t>(seed);
  return seed;
}

int64_t LlmRunner::prefill(std::span<const int64_t> tokens) {
  impl_->check_prompt(tokens);
  return *impl_->feed(tokens, /*cancellable=*/false);
}

int64_t LlmRunner::step(int64_t token) {
  return prefill({&token, 1});
}

GenerateResult LlmRunner::generate(
    std::span<const int64_t> prompt, const GenerateConfig& config, const TokenCallback& on_token) {
  const auto begin = Clock::now();
  Impl& state = *impl_;
  const LlmMetadata& meta = metadata();
  state.cancelled.store(false, std::memory_order_relaxed);

  check_argument(
      config.max_new_tokens >= 1,
      "max_new_tokens: ", config.max_new_tokens, ", expected at least 1");
  state.check_ids("stop_ids", config.stop_ids);
  state.check_prompt(prompt);
  const auto stops = [&](int64_t token) {
    const auto in = [&](const std::vector<int64_t>& ids) {
      return std::find(ids.begin(), ids.end(), token) != ids.end();
    };
    return in(config.stop_ids) || (!config.ignore_eos && in(meta.eos_ids));
  };

  GenerateResult result;
  Timings& timings = result.timings;
  result.seed = start(config.sampling);
  const auto prompt_size = static_cast<int64_t>(prompt.size());
  const int64_t room = meta.max_context_len - state.position - prompt_size + 1;
  result.tokens.reserve(std::min({config.max_new_tokens, room, kReserved}));

  const int64_t position = state.position;
  const auto prefill_begin = Clock::now();
  std::optional<int64_t> token = state.feed(prompt, /*cancellable=*/true);
  timings.prompt_tokens = state.position - position;
  timings.prefill = seconds_since(prefill_begin);
  timings.time_to_first_token = seconds_since(begin);

  Utf8Stream utf8;
  std::string text;
  result.finish = FinishReason::kCancelled;
  while (token) {
    if (stops(*token)) {
      result.stop_id = token;
      result.finish = FinishReason::kStopId;
      break;
    }
    result.tokens.push_back(*token);
    text.clear();
    if (meta.has_tokens) {
      utf8.feed(token_bytes(*token), text);
      result.text += text;
    }
    if (on_token && !on_token(*token, text)) {
      break;
    }
    if (static_cast<int64_t>(result.tokens.size()) == config.max_new_tokens) {
      result.finish = FinishReason::kMaxNewTokens;
      break;
    }
    if (state.position == meta.max_context_len) {
      result.finish = FinishReason::kContextFull;
      break;
    }
    const auto step_begin = Clock::now();
    const int64_t last = *token;
    token = state.feed({&last, 1}, /*cancellable=*/true);
    if (token) {
      ++timings.decoded_tokens;
      timings.decode += seconds_since(step_begin);
    }
  }
  utf8.finish(result.text);
  return result;
}

} // namespace executorch_mlx
