#include <executorch_mlx/llm_runner.h>

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <random>

#include "answer_builder.h"
#include "check.h"
#include "host_sampler.h"
#include "llm_program.h"
#include "request_checks.h"

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
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kContext:
      return "context";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

double Timings::prefill_tokens_per_second() const {
  return rate(prompt_tokens, prefill);
}

double Timings::decode_tokens_per_second() const {
  return rate(decoded_tokens, decode);
}

// The seed is not negative, because a number without a sign is easier to type.
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
  return int64_t{usage.ru_maxrss} * 1024; // Linux reports KiB
#endif
}

// Token ids for every sequence of the program.
using Sequences = std::vector<std::vector<int64_t>>;

struct LlmRunner::Impl {
  Impl(const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer)
      : program(path, device, tracer), context(program.metadata().batch_size), padding(context.size()) {}

  std::optional<int64_t> begin_answer(const SamplingParameters& parameters);
  void truncate(int64_t length);
  void process_chunk(const Chunk& chunk);
  std::vector<int64_t> draw(const Chunk& chunk, std::span<const int64_t> answer);
  std::vector<int64_t> draw_from_logits(const Chunk& chunk, std::span<const int64_t> answer);
  std::optional<std::vector<int64_t>> feed(const Sequences& sequences, std::span<const int64_t> answer);
  void run(Sequences sequences, std::vector<AnswerBuilder>& answers, const BatchTokenCallback& on_token);

  LlmProgram program;
  double load_seconds = 0;

  int64_t position = 0; // number of positions in use in the KV cache
  Sequences context; // the tokens in the KV cache, padding included
  std::vector<int64_t> padding; // the number of padding positions at the left of each sequence

  // The running answer.
  const SamplingParameters* sampling = nullptr;
  bool samples_on_host = false;
  uint64_t base_seed = 0; // of step 0; unsigned, so that base_seed + step can wrap around
  uint64_t step = 0;

  // Lock-free, so that a signal handler may set it.
  std::atomic<bool> cancelled = false;
  static_assert(std::atomic<bool>::is_always_lock_free);
};

// Prepares for an answer: decides whether the head or the host samples, and chooses the seed. Returns the seed of the
// first token, or nullopt if the head samples and accepts no seed. `parameters` must outlive the answer.
std::optional<int64_t> LlmRunner::Impl::begin_answer(const SamplingParameters& parameters) {
  const LlmMetadata& meta = program.metadata();
  sampling = &parameters;
  samples_on_host = !meta.has_head || program.unsupported_parameter(parameters) != nullptr;
  step = 0;
  cancelled.store(false, std::memory_order_relaxed);
  if (!samples_on_host) {
    program.set_sampling(parameters);
  }
  if (!samples_on_host && !meta.takes_seed) {
    return std::nullopt;
  }
  const int64_t seed = parameters.seed ? *parameters.seed : random_seed();
  base_seed = static_cast<uint64_t>(seed);
  return seed;
}

// Keeps only the first `length` positions of the context.
void LlmRunner::Impl::truncate(int64_t length) {
  position = length;
  for (auto& tokens : context) {
    tokens.resize(std::min<size_t>(tokens.size(), length));
  }
  if (length == 0) {
    std::fill(padding.begin(), padding.end(), 0);
  }
}

// Adds a chunk of the prompt that is not the last one to the KV cache. What the program returns is discarded.
void LlmRunner::Impl::process_chunk(const Chunk& chunk) {
  if (samples_on_host) {
    program.logits(chunk);
  } else {
    program.draw(chunk, static_cast<int64_t>(base_seed));
  }
}

// Adds `chunk` to the KV cache and draws the next token of each sequence. `answer` contains the tokens of the answer so
// far, which the callback SamplingParameters::allowed_tokens receives.
std::vector<int64_t> LlmRunner::Impl::draw(const Chunk& chunk, std::span<const int64_t> answer) {
  if (samples_on_host) {
    return draw_from_logits(chunk, answer);
  }
  if (sampling->allowed_tokens) {
    const auto masks = program.allowed_tokens();
    const size_t mask_size = masks.size() / context.size();
    sampling->allowed_tokens(answer, masks.first(mask_size));
    for (size_t i = 1; i < context.size(); ++i) {
      std::copy_n(masks.begin(), mask_size, masks.begin() + i * mask_size);
    }
  }
  return program.draw(chunk, static_cast<int64_t>(base_seed + step));
}

// Does what draw() does, but draws on the host.
std::vector<int64_t> LlmRunner::Impl::draw_from_logits(const Chunk& chunk, std::span<const int64_t> answer) {
  const LlmMetadata& meta = program.metadata();
  auto logits = program.logits(chunk);
  std::vector<int32_t> allowed;
  if (sampling->allowed_tokens) {
    allowed.assign((meta.vocab_size + 31) / 32, -1);
    sampling->allowed_tokens(answer, allowed);
  }
  std::vector<int64_t> tokens;
  for (size_t i = 0; i < context.size(); ++i) {
    std::span<const int64_t> history = context[i];
    history = history.subspan(padding[i]);
    if (meta.history > 0 && static_cast<int64_t>(history.size()) > meta.history) {
      history = history.last(meta.history);
    }
    const HostDraw draw = {
        .logits = std::span(logits).subspan(i * meta.vocab_size, meta.vocab_size),
        .sequence = static_cast<int64_t>(i),
        .batch = meta.batch_size,
        .seed = static_cast<int64_t>(base_seed + step),
        .history = history,
        .allowed_tokens = allowed};
    tokens.push_back(draw_on_host(draw, *sampling));
  }
  return tokens;
}

// Adds `sequences`, which all have the same length, to the KV cache in chunks. Draws the next token of each sequence
// and returns these tokens, or nullopt if the answer was cancelled before the last chunk.
std::optional<std::vector<int64_t>> LlmRunner::Impl::feed(
    const Sequences& sequences, std::span<const int64_t> answer) {
  const auto length = static_cast<int64_t>(sequences[0].size());
  const int64_t max_chunk = program.metadata().max_seq_len;
  for (int64_t begin = 0; begin < length; begin += max_chunk) {
    if (cancelled.load(std::memory_order_relaxed)) {
      return std::nullopt;
    }
    const int64_t count = std::min(max_chunk, length - begin);
    std::vector<int64_t> tokens;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const auto first = sequences[i].begin() + begin;
      tokens.insert(tokens.end(), first, first + count);
      context[i].insert(context[i].end(), first, first + count);
    }
    const Chunk chunk = {tokens, position, padding};
    if (begin + count == length) {
      auto drawn = draw(chunk, answer);
      position += count;
      ++step;
      return drawn;
    }
    process_chunk(chunk);
    position += count;
  }
  return std::nullopt;
}

// Generates all answers side by side, beginning with the prompts in `sequences`. If there is only one answer, it
// consists of the tokens drawn for sequence 0, and all sequences continue with these tokens.
void LlmRunner::Impl::run(
    Sequences sequences, std::vector<AnswerBuilder>& answers, const BatchTokenCallback& on_token) {
  const int64_t capacity = program.metadata().max_context_len;
  const auto is_over = [](const AnswerBuilder& answer) { return answer.is_over(); };
  for (bool is_prefill = true; !std::all_of(answers.begin(), answers.end(), is_over); is_prefill = false) {
    const auto begin = Clock::now();
    const int64_t position_before = position;
    // The tokens of answers[0] are for the callback allowed_tokens, which generate_batch() refuses for several answers.
    const auto drawn = feed(sequences, answers[0].result.tokens);
    const double seconds = seconds_since(begin);
    for (size_t i = 0; i < answers.size(); ++i) {
      AnswerBuilder& answer = answers[i];
      if (answer.is_over()) {
        continue;
      }
      Timings& timings = answer.result.timings;
      if (is_prefill) {
        const int64_t padded = drawn && position_before == 0 ? padding[i] : 0;
        timings.prompt_tokens = position - position_before - padded;
        timings.prefill = timings.time_to_first_token = seconds;
      } else if (drawn) {
        ++timings.decoded_tokens;
        timings.decode += seconds;
      }
      if (!drawn) {
        answer.cancel();
        continue;
      }
      const auto call = [&](int64_t token, std::string_view text) { return on_token(i, token, text); };
      answer.take((*drawn)[i], position < capacity, on_token ? TokenCallback(call) : TokenCallback());
    }
    for (size_t i = 0; drawn && i < sequences.size(); ++i) {
      sequences[i] = {(*drawn)[answers.size() == 1 ? 0 : i]};
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
  impl_->truncate(0);
}

void LlmRunner::rewind(int64_t position) {
  const int64_t lowest = std::max<int64_t>(0, impl_->position - metadata().max_rewind);
  check_argument(
      position == 0 || (lowest <= position && position <= impl_->position),
      "rewind: got position ", position, ", expected 0 or ", lowest, " to ", impl_->position);
  impl_->truncate(position);
}

GenerateResult LlmRunner::generate(
    std::span<const int64_t> prompt, const GenerateConfig& config, const TokenCallback& on_token) {
  Impl& state = *impl_;
  check_prompt(metadata(), prompt, state.position);
  check_config(state.program, config);
  std::vector<AnswerBuilder> answers;
  answers.emplace_back(state.program, config);
  answers[0].result.seed = state.begin_answer(config.sampling);
  const auto call = [&](size_t, int64_t token, std::string_view text) { return on_token(token, text); };
  state.run(
      Sequences(state.context.size(), {prompt.begin(), prompt.end()}), answers,
      on_token ? BatchTokenCallback(call) : BatchTokenCallback());
  return std::move(answers[0].result);
}

std::vector<GenerateResult> LlmRunner::generate_batch(
    std::span<const std::vector<int64_t>> prompts, const GenerateConfig& config, const BatchTokenCallback& on_token) {
  Impl& state = *impl_;
  const size_t batch = state.context.size();
  check_argument(
      1 <= prompts.size() && prompts.size() <= batch,
      "prompts: got ", prompts.size(), ", expected at least 1 and at most ", batch, " (the batch size)");
  check_argument(
      prompts.size() == 1 || !config.sampling.allowed_tokens,
      "allowed_tokens: got ", prompts.size(), " prompts, expected 1");
  size_t longest = 0;
  for (const auto& prompt : prompts) {
    check_prompt(metadata(), prompt, 0);
    longest = std::max(longest, prompt.size());
  }
  check_config(state.program, config);
  const auto seed = state.begin_answer(config.sampling);
  std::vector<AnswerBuilder> answers;
  for (size_t i = 0; i < prompts.size(); ++i) {
    answers.emplace_back(state.program, config).result.seed = seed;
  }

  reset();
  // Shorter prompts are padded on the left. Any token will do, because no query attends to the padding. If there are
  // fewer prompts than sequences, the other sequences repeat the first prompt.
  Sequences sequences;
  for (size_t i = 0; i < batch; ++i) {
    const auto& prompt = prompts[i < prompts.size() ? i : 0];
    state.padding[i] = static_cast<int64_t>(longest - prompt.size());
    sequences.emplace_back(state.padding[i], 0);
    sequences.back().insert(sequences.back().end(), prompt.begin(), prompt.end());
  }
  state.run(std::move(sequences), answers, on_token);
  reset();
  std::vector<GenerateResult> results;
  for (AnswerBuilder& answer : answers) {
    results.push_back(std::move(answer.result));
  }
  return results;
}

} // namespace executorch_mlx
