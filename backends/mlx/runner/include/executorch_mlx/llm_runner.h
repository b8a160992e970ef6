// Runs a language model that executorch_mlx.llm exported: token ids in, token ids and
// text out.
//
//   executorch_mlx::LlmRunner runner("model.pte");
//   executorch_mlx::GenerateConfig config;
//   config.sampling.temperature = 0.8f;
//   runner.generate(prompt_ids, config, [](int64_t id, std::string_view text) {
//     std::cout << text << std::flush;
//     return true;  // false ends the answer
//   });
//
// A runner belongs to one thread at a time; cancel() may come from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace executorch::runtime {
class EventTracer;
}

namespace executorch_mlx {

// The program cannot be loaded, is not one of ours, or failed while it ran.
class LlmError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller asked for what this program cannot do: an id outside the
// vocabulary, a prompt that is too long, a parameter that was not exported.
class LlmArgumentError : public LlmError {
 public:
  using LlmError::LlmError;
};

// What the program says about itself.
struct LlmMetadata {
  int64_t max_seq_len = 0; // tokens that one call takes
  int64_t max_context_len = 0; // positions that the KV cache has
  int64_t max_rewind = 0; // positions that it can go back by, beside all of them
  int64_t batch_size = 1; // rows
  int64_t vocab_size = 0;
  std::optional<int64_t> bos_id;
  std::vector<int64_t> eos_ids;
  bool has_head = false; // draws tokens inside
  bool has_logits = false; // returns logits, for tokens to be drawn from on the host
  // Parameters of the head.
  bool takes_seed = false; // if not, the draws differ from run to run
  bool takes_top_k = false;
  bool takes_min_p = false;
  bool takes_penalties = false;
  bool takes_allowed_tokens = false;
  int64_t logit_bias = 0; // tokens that can have one, at most
  int64_t history = 0; // tokens that the penalties look at; 0: not said
  bool has_tokens = false; // the bytes of each token, for text out
};

// Marks the tokens that may come next: bit v % 32 of word v / 32 stands for token v. All
// are set when it is called; `answer` are the ids of the answer so far.
using AllowedTokens = std::function<void(std::span<const int64_t> answer, std::span<int32_t> words)>;

// The parameters of a draw, off by default. Where the program's head takes those that
// are on they are judged inside the program, see `mlx::sample`; else on the host, from
// its logits, with the same tokens up to the rounding of two devices.
struct Sampling {
  float temperature = 0; // 0 is greedy
  float top_p = 1; // 1 is off
  int64_t top_k = 0; // 0 is off
  float min_p = 0; // 0 is off
  std::optional<int64_t> seed; // of the first token; unset: a random one
  // Over the last tokens of prompt and answer; off are 1, 0 and 0.
  float repetition_penalty = 1;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::vector<std::pair<int64_t, float>> logit_bias; // token and what its logit gets
  AllowedTokens allowed_tokens;
};

struct GenerateConfig {
  Sampling sampling;
  int64_t max_new_tokens = 128; // at least 1
  std::vector<int64_t> stop_ids; // besides the program's eos_ids
  std::vector<std::string> stop; // texts that end the answer, before them
  bool ignore_eos = false; // do not stop at the program's eos_ids
};

enum class FinishReason {
  kStopId, // a stop id was drawn
  kStopText, // one of GenerateConfig::stop came
  kMaxNewTokens,
  kContextFull, // the KV cache has no position left
  kCancelled, // by cancel(), or the callback returned false
};
const char* to_string(FinishReason reason);

// Seconds inside the model; what the callback does is not counted.
struct Timings {
  int64_t prompt_tokens = 0; // those that were in the cache before do not count
  int64_t decoded_tokens = 0; // drawn by steps, after the prefill's
  double time_to_first_token = 0; // from the call of generate
  double prefill = 0;
  double decode = 0;

  double prefill_tokens_per_second() const; // 0 if there were none
  double decode_tokens_per_second() const;
};

struct GenerateResult {
  std::vector<int64_t> tokens; // without the stop id
  // What the callback got, and what was held back: the beginning of a stop text that did
  // not go on, U+FFFD for a character left incomplete. Empty without token bytes.
  std::string text;
  FinishReason finish = FinishReason::kMaxNewTokens;
  std::optional<int64_t> stop_id; // the one that was drawn
  std::optional<int64_t> seed; // the base seed, if the program takes one, or the host draws
  Timings timings;
};

// One new token and the text it lets out: whole characters only, and nothing that may
// yet become a stop text. Returns whether to go on.
using TokenCallback = std::function<bool(int64_t token, std::string_view text)>;

// The same of one of several rows: whether that one is to go on.
using RowCallback = std::function<bool(size_t row, int64_t token, std::string_view text)>;

// A seed for an answer that is to be had again.
int64_t random_seed();

// The most memory that this process ever had resident.
int64_t peak_resident_bytes();

class LlmRunner {
 public:
  // Loads the program. `device` is where MLX runs: "cpu",
  // "gpu", or "" for the environment's EXECUTORCH_MLX_DEVICE, else MLX's default.
  // `tracer`, which has to outlive the runner, gets to see every instruction and
  // makes them slower. Throws LlmError, LlmArgumentError if there is no such file
  // or device.
  explicit LlmRunner(
      const std::string& path,
      const std::string& device = "",
      executorch::runtime::EventTracer* tracer = nullptr);
  ~LlmRunner();
  LlmRunner(const LlmRunner&) = delete;
  LlmRunner& operator=(const LlmRunner&) = delete;

  const LlmMetadata& metadata() const;
  double load_seconds() const;

  // The raw bytes of a token, which may be a part of a character; special tokens
  // have none. They live as long as the runner. Throws LlmArgumentError.
  std::string_view token_bytes(int64_t token) const;

  // Appends `prompt` to the conversation and draws tokens until something ends
  // the answer. The last token drawn, be it a stop id, is not in the KV cache
  // yet: a next turn that keeps the conversation begins with it. A program of
  // several rows does the same in all of them.
  // Throws LlmArgumentError before anything ran, LlmError if a step fails.
  GenerateResult generate(
      std::span<const int64_t> prompt,
      const GenerateConfig& config,
      const TokenCallback& on_token = {});

  // The answers to as many prompts as the program has rows, or fewer, side by side from
  // an empty cache, which is empty again afterwards. The rows have one seed, and each its
  // own noise.
  std::vector<GenerateResult> generate_batch(
      std::span<const std::vector<int64_t>> prompts,
      const GenerateConfig& config,
      const RowCallback& on_token = {});

  // Ends a running answer before its next step; without one, does nothing. For another
  // thread or a signal handler.
  void cancel() noexcept;

  // Positions in the KV cache. rewind() goes back to an earlier one, for a prompt that
  // goes on from there; reset() to none. Throws LlmArgumentError if the cache does not
  // hold what came before.
  int64_t position() const;
  void rewind(int64_t position);
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace executorch_mlx
