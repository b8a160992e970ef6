// Runs a language model that was exported with its sampling head: token ids in,
// token ids and text out.
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
  int64_t vocab_size = 0;
  std::optional<int64_t> bos_id;
  std::vector<int64_t> eos_ids;
  bool takes_seed = false; // if not, the draws differ from run to run
  bool takes_top_k = false;
  bool takes_min_p = false;
  bool has_tokens = false; // the bytes of each token, for text out
};

// Parameters that are set have to be inputs of the program; those left unset are
// off. All are judged inside the program: see `mlx::sample`.
struct Sampling {
  float temperature = 0; // 0 is greedy
  float top_p = 1; // 1 is off
  std::optional<int64_t> top_k; // 0 is off
  std::optional<float> min_p; // 0 is off
  std::optional<int64_t> seed; // of the first token; unset: a random one
};

struct GenerateConfig {
  Sampling sampling;
  int64_t max_new_tokens = 128; // at least 1
  std::vector<int64_t> stop_ids; // besides the program's eos_ids
  bool ignore_eos = false; // do not stop at the program's eos_ids
};

enum class FinishReason {
  kStopId, // a stop id was drawn
  kMaxNewTokens,
  kContextFull, // the KV cache has no position left
  kCancelled, // by cancel(), or the callback returned false
};
const char* to_string(FinishReason reason);

// Seconds inside the model; what the callback does is not counted.
struct Timings {
  int64_t prompt_tokens = 0;
  int64_t decoded_tokens = 0; // drawn by steps, after the prefill's
  double time_to_first_token = 0; // from the call of generate
  double prefill = 0;
  double decode = 0;

  double prefill_tokens_per_second() const; // 0 if there were none
  double decode_tokens_per_second() const;
};

struct GenerateResult {
  std::vector<int64_t> tokens; // without the stop id
  // What the callback got, and U+FFFD for a character that was left incomplete.
  // Empty if the program has no token bytes.
  std::string text;
  FinishReason finish = FinishReason::kMaxNewTokens;
  std::optional<int64_t> stop_id; // the one that was drawn
  std::optional<int64_t> seed; // the base seed, if the program takes one
  Timings timings;
};

// One new token and the text it completes, which is empty while a character is
// incomplete. Returns whether to go on.
using TokenCallback = std::function<bool(int64_t token, std::string_view text)>;

class LlmRunner {
 public:
  // Loads the program and its method `forward`. `device` is where MLX runs: "cpu",
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
  // yet: a next turn that keeps the conversation begins with it.
  // Throws LlmArgumentError before anything ran, LlmError if a step fails.
  GenerateResult generate(
      std::span<const int64_t> prompt,
      const GenerateConfig& config,
      const TokenCallback& on_token = {});

  // Ends a running generate() before its next step; without one, does nothing.
  // For another thread or a signal handler.
  void cancel() noexcept;

  // The same by hand. start() sets the parameters and gives the base seed;
  // prefill() appends tokens, in pieces if they are more than max_seq_len, and
  // step() one; both return the token drawn after them, seeded base, base + 1, ...
  std::optional<int64_t> start(const Sampling& sampling);
  int64_t prefill(std::span<const int64_t> tokens);
  int64_t step(int64_t token);

  // Tokens in the KV cache, and an empty one: masks hide what it held.
  int64_t position() const;
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace executorch_mlx
