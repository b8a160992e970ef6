#include <executorch_mlx/llm_runner.h>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <optional>
#include <random>

#include "answer.h"
#include "host_sampler.h"
#include "llm_program.h"
#include "text.h"

namespace executorch_mlx {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double rate(int64_t count, double seconds) {
  return count > 0 && seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

} // namespace

const char* to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStopId:
      return "stop id";
    case FinishReason::kStopText:
      return "stop text";
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

// Not negative, so that it can be typed again without a thought.
int64_t random_seed() {
  std::random_device source;
  const uint64_t bits = (static_cast<uint64_t>(source()) << 32) | source();
  return static_cast<int64_t>(bits >> 1);
}

int64_t peak_resident_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
  return usage.ru_maxrss;
#else
  return int64_t{usage.ru_maxrss} * 1024;
#endif
}

// What goes into the caches next, a row for each of the program's, all of one length.
using Rows = std::vector<std::vector<int64_t>>;

struct LlmRunner::Impl {
  Impl(const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer)
      : program(path, device, tracer), context(program.metadata().batch_size), start(context.size()) {}

  void check_prompt(std::span<const int64_t> tokens, int64_t at) const;
  void check_sampling(const Sampling& sampling) const;
  std::optional<int64_t> begin(const Sampling& sampling);
  std::optional<std::vector<int64_t>> feed(const Rows& rows, std::span<const int64_t> answer);
  std::vector<int64_t> draw(const Piece& piece, std::span<const int64_t> answer);
  std::vector<int64_t> draw_on_host(const Piece& piece, std::span<const int64_t> answer);
  void go_back(int64_t to);

  // Answers in rows of their own; or one of them, in all rows.
  void run(Rows rows, std::vector<Answer>& answers, const RowCallback& on_token);

  LlmProgram program;
  double load_seconds = 0;
  int64_t position = 0;
  Rows context; // the tokens in the caches by row, padding included
  std::vector<int64_t> start;
  const Sampling* sampling = nullptr; // of the running answer
  bool on_host = false;
  uint64_t base_seed = 0; // unsigned: the seeds go round at the end of int64
  uint64_t drawn = 0;
  // A signal handler may store to it only if no lock is behind.
  std::atomic<bool> cancelled = false;
  static_assert(std::atomic<bool>::is_always_lock_free);
};

void LlmRunner::Impl::check_prompt(std::span<const int64_t> tokens, int64_t at) const {
  const LlmMetadata& meta = program.metadata();
  check_argument(!tokens.empty(), "prompt: empty, expected at least 1 token");
  check_argument(
      static_cast<int64_t>(tokens.size()) <= meta.max_context_len - at,
      "prompt: ", tokens.size(), " tokens after ", at, " in the context are more than its ",
      meta.max_context_len, " positions");
  for (const int64_t id : tokens) {
    check_argument(
        0 <= id && id < meta.vocab_size, "prompt: id ", id, " is outside the vocabulary [0, ", meta.vocab_size, ")");
  }
}

void LlmRunner::Impl::check_sampling(const Sampling& s) const {
  const LlmMetadata& meta = program.metadata();
  const auto number = [](const char* name, float value) {
    check_argument(std::isfinite(value), name, ": ", value, ", expected a number");
  };
  number("temperature", s.temperature);
  number("top_p", s.top_p);
  number("min_p", s.min_p);
  number("presence_penalty", s.presence_penalty);
  number("frequency_penalty", s.frequency_penalty);
  check_argument(
      std::isfinite(s.repetition_penalty) && s.repetition_penalty > 0,
      "repetition_penalty: ", s.repetition_penalty, ", expected a number above 0");
  for (const auto& [token, value] : s.logit_bias) {
    check_argument(
        0 <= token && token < meta.vocab_size,
        "logit_bias: id ", token, " is outside the vocabulary [0, ", meta.vocab_size, ")");
    check_argument(!std::isnan(value), "logit_bias: ", value, " for id ", token, ", expected a number");
  }
  const char* missing = meta.has_head ? program.not_taken(s) : nullptr;
  check_argument(missing == nullptr || meta.has_logits, missing ? missing : "", ": the program was exported without it");
  check_argument(
      missing != nullptr || !meta.has_head || static_cast<int64_t>(s.logit_bias.size()) <= meta.logit_bias,
      "logit_bias: ", s.logit_bias.size(), " tokens, the program takes ", meta.logit_bias);
}

// The base seed, where there is one.
std::optional<int64_t> LlmRunner::Impl::begin(const Sampling& s) {
  const LlmMetadata& meta = program.metadata();
  check_sampling(s);
  sampling = &s;
  on_host = !meta.has_head || program.not_taken(s) != nullptr;
  drawn = 0;
  if (!on_host) {
    program.set_sampling(s);
  }
  if (!on_host && !meta.takes_seed) {
    return std::nullopt;
  }
  const int64_t seed = s.seed ? *s.seed : random_seed();
  base_seed = static_cast<uint64_t>(seed);
  return seed;
}

// The tokens drawn after `rows`; none if cancelled between two pieces.
std::optional<std::vector<int64_t>> LlmRunner::Impl::feed(const Rows& rows, std::span<const int64_t> answer) {
  const auto length = static_cast<int64_t>(rows[0].size());
  const int64_t most = program.metadata().max_seq_len;
  for (int64_t i = 0; i < length; i += most) {
    if (cancelled.load(std::memory_order_relaxed)) {
      return std::nullopt;
    }
    const int64_t count = std::min(most, length - i);
    std::vector<int64_t> tokens;
    for (const auto& row : rows) {
      tokens.insert(tokens.end(), row.begin() + i, row.begin() + i + count);
    }
    const Piece piece = {tokens, position, start};
    const bool is_last = i + count == length;
    if (!is_last && on_host) {
      program.logits(piece);
    } else if (!is_last) {
      // What it draws is of no use.
      program.draw(piece, static_cast<int64_t>(base_seed));
    }
    for (size_t row = 0; row < rows.size(); ++row) {
      context[row].insert(context[row].end(), rows[row].begin() + i, rows[row].begin() + i + count);
    }
    if (is_last) {
      auto result = draw(piece, answer);
      position += count;
      ++drawn;
      return result;
    }
    position += count;
  }
  return std::nullopt;
}

std::vector<int64_t> LlmRunner::Impl::draw(const Piece& piece, std::span<const int64_t> answer) {
  if (on_host) {
    return draw_on_host(piece, answer);
  }
  if (sampling->allowed_tokens) {
    const auto masks = program.allowed_tokens();
    const size_t words = masks.size() / context.size();
    sampling->allowed_tokens(answer, masks.first(words));
    for (size_t row = 1; row < context.size(); ++row) {
      std::copy_n(masks.begin(), words, masks.begin() + row * words);
    }
  }
  return program.draw(piece, static_cast<int64_t>(base_seed + drawn));
}

std::vector<int64_t> LlmRunner::Impl::draw_on_host(const Piece& piece, std::span<const int64_t> answer) {
  const LlmMetadata& meta = program.metadata();
  auto logits = program.logits(piece);
  std::vector<int32_t> allowed;
  if (sampling->allowed_tokens) {
    allowed.assign((meta.vocab_size + 31) / 32, -1);
    sampling->allowed_tokens(answer, allowed);
  }
  std::vector<int64_t> tokens;
  for (size_t row = 0; row < context.size(); ++row) {
    std::span<const int64_t> history = context[row];
    history = history.subspan(start[row]);
    if (meta.history > 0 && static_cast<int64_t>(history.size()) > meta.history) {
      history = history.last(meta.history);
    }
    const HostDraw one = {
        std::span(logits).subspan(row * meta.vocab_size, meta.vocab_size),
        static_cast<int64_t>(row),
        meta.batch_size,
        static_cast<int64_t>(base_seed + drawn),
        history,
        allowed};
    tokens.push_back(executorch_mlx::draw_on_host(one, *sampling));
  }
  return tokens;
}

void LlmRunner::Impl::go_back(int64_t to) {
  position = to;
  for (auto& row : context) {
    row.resize(std::min<size_t>(row.size(), to));
  }
  if (to == 0) {
    std::fill(start.begin(), start.end(), 0);
  }
}

void LlmRunner::Impl::run(Rows rows, std::vector<Answer>& answers, const RowCallback& on_token) {
  const int64_t capacity = program.metadata().max_context_len;
  const auto is_over = [](const Answer& answer) { return answer.is_over(); };
  const auto count_of = [](const std::vector<int64_t>& row, int64_t padding) {
    return static_cast<int64_t>(row.size()) - padding;
  };
  const bool is_alone = answers.size() == 1;
  for (bool is_first = true; !std::all_of(answers.begin(), answers.end(), is_over); is_first = false) {
    const auto step = Clock::now();
    const int64_t from = position;
    // Masks are of one answer.
    const auto tokens = feed(rows, answers[0].result.tokens);
    const double seconds = seconds_since(step);
    for (size_t i = 0; i < answers.size(); ++i) {
      Timings& timings = answers[i].result.timings;
      if (answers[i].is_over()) {
        continue;
      }
      if (is_first) {
        timings.prompt_tokens = tokens ? count_of(rows[i], from == 0 ? start[i] : 0) : position - from;
        timings.prefill = timings.time_to_first_token = seconds;
      } else if (tokens) {
        ++timings.decoded_tokens;
        timings.decode += seconds;
      }
      if (!tokens) {
        answers[i].cancel();
        continue;
      }
      const auto call = [&](int64_t token, std::string_view text) { return on_token(i, token, text); };
      answers[i].take((*tokens)[i], position < capacity, on_token ? TokenCallback(call) : TokenCallback());
    }
    for (size_t row = 0; tokens && row < rows.size(); ++row) {
      rows[row] = {(*tokens)[is_alone ? 0 : row]};
    }
  }
}

LlmRunner::LlmRunner(
    const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer) {
  const auto begin = Clock::now();
  impl_ = std::make_unique<Impl>(path, device, tracer);
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
  impl_->go_back(0);
}

void LlmRunner::rewind(int64_t position) {
  const int64_t least = std::max<int64_t>(0, impl_->position - metadata().max_rewind);
  check_argument(
      position == 0 || (least <= position && position <= impl_->position),
      "rewind: position ", position, ", expected 0 or ", least, " to ", impl_->position);
  impl_->go_back(position);
}

GenerateResult LlmRunner::generate(
    std::span<const int64_t> prompt, const GenerateConfig& config, const TokenCallback& on_token) {
  Impl& state = *impl_;
  std::vector<Answer> answers;
  answers.emplace_back(state.program, config);
  state.check_prompt(prompt, state.position);
  answers[0].result.seed = state.begin(config.sampling);
  state.cancelled.store(false, std::memory_order_relaxed);
  const auto call = [&](size_t, int64_t token, std::string_view text) { return on_token(token, text); };
  state.run(
      Rows(state.context.size(), {prompt.begin(), prompt.end()}), answers,
      on_token ? RowCallback(call) : RowCallback());
  return std::move(answers[0].result);
}

std::vector<GenerateResult> LlmRunner::generate_batch(
    std::span<const std::vector<int64_t>> prompts, const GenerateConfig& config, const RowCallback& on_token) {
  Impl& state = *impl_;
  const size_t batch = state.context.size();
  check_argument(
      1 <= prompts.size() && prompts.size() <= batch,
      "prompts: ", prompts.size(), ", the program has ", batch, batch == 1 ? " row" : " rows");
  check_argument(
      prompts.size() == 1 || !config.sampling.allowed_tokens, "allowed_tokens: of one answer only, there are ",
      prompts.size());
  std::vector<Answer> answers;
  size_t longest = 0;
  for (const auto& prompt : prompts) {
    state.check_prompt(prompt, 0);
    answers.emplace_back(state.program, config);
    longest = std::max(longest, prompt.size());
  }
  const auto seed = state.begin(config.sampling);
  for (Answer& answer : answers) {
    answer.result.seed = seed;
  }
  state.cancelled.store(false, std::memory_order_relaxed);
  reset();
  // Padded on the left; any token does, it is not attended. A row without a prompt
  // repeats the first.
  Rows rows;
  for (size_t row = 0; row < batch; ++row) {
    const auto& prompt = prompts[row < prompts.size() ? row : 0];
    state.start[row] = static_cast<int64_t>(longest - prompt.size());
    rows.emplace_back(state.start[row], 0);
    rows.back().insert(rows.back().end(), prompt.begin(), prompt.end());
  }
  state.run(std::move(rows), answers, on_token);
  reset();
  std::vector<GenerateResult> results;
  for (Answer& answer : answers) {
    results.push_back(std::move(answer.result));
  }
  return results;
}

} // namespace executorch_mlx
