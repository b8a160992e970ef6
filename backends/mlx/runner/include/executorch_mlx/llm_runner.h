// Runs a language model that `export_llm` wrote: token ids in, token ids and text out.
//
//   executorch_mlx::LlmRunner runner("model.pte");
//   executorch_mlx::GenerateConfig config;
//   config.sampling.temperature = 0.8f;
//   runner.generate(prompt_ids, config, [](int64_t token, std::string_view text) {
//     std::cout << text << std::flush;
//     return true; // false ends the answer
//   });
//
// A runner is not thread-safe: use it from one thread at a time. Only cancel() may be called from any thread.
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

// Thrown if the program cannot be loaded, is not a language model of this project, or fails while it runs.
class LlmError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown if the request is invalid for this program: for example because of a token id outside the vocabulary, a prompt
// that does not fit into the context, or a sampling parameter that the program was exported without.
class LlmArgumentError : public LlmError {
 public:
  using LlmError::LlmError;
};

// Thrown if the program or a step does not fit into the memory limit (see executorch_mlx/memory.h) or into the memory
// of the machine. The message has the sizes if the limit is the reason.
class LlmMemoryError : public LlmError {
 public:
  using LlmError::LlmError;
};

// The properties of a program, read from its metadata methods. docs/llm-program.md lists these methods.
struct LlmMetadata {
  int64_t max_seq_len = 0; // largest chunk: tokens of one sequence in one call
  int64_t max_context_len = 0; // capacity of the KV cache, in positions
  int64_t max_rewind = 0; // how many positions rewind() can go back; position 0 is always possible
  int64_t batch_size = 1; // number of sequences
  int64_t vocab_size = 0; // number of token ids
  std::optional<int64_t> bos_id; // the token that begins a text
  std::vector<int64_t> eos_ids; // the tokens that end an answer
  bool has_head = false; // the program has a sampling head, and can return tokens
  bool has_logits = false; // the program can return logits, so that the host can sample

  // Which sampling parameters the head accepts, besides temperature and top_p.
  bool takes_seed = false; // if false, the draws of the head differ from run to run
  bool takes_top_k = false;
  bool takes_min_p = false;
  bool takes_penalties = false;
  bool takes_allowed_tokens = false;
  int64_t logit_bias = 0; // the largest number of tokens whose logits the head can bias; 0: no logit bias
  // The penalties consider this number of tokens, counted from the end of the prompt and answer so far. 0 means that
  // the program does not give a number; the host then considers all tokens.
  int64_t history = 0;

  bool has_token_bytes = false; // the program contains the bytes of each token, so answers have text
};

// Selects the tokens that may be drawn next, by clearing the bits of all other tokens in `mask`. Bit v % 32 of
// mask[v / 32] stands for token v. All bits are set when the function is called. `answer` contains the tokens of the
// answer so far.
using AllowedTokens = std::function<void(std::span<const int64_t> answer, std::span<int32_t> mask)>;

// How the next token is chosen. With the default values, decoding is greedy and the logits are not changed.
//
// If the program has a sampling head that accepts all parameters whose values are not the default, the head applies the
// parameters. Otherwise, the host applies them to the logits that the program returns. Both ways choose the same
// tokens, except where the rounding of two devices differs.
struct SamplingParameters {
  float temperature = 0; // divides the logits; 0 or less: greedy
  float top_p = 1; // keep the most likely tokens whose probabilities add up to top_p; 1: keep all
  int64_t top_k = 0; // keep the k most likely tokens; 0: keep all
  float min_p = 0; // keep tokens with at least min_p times the highest probability; 0: keep all
  std::optional<int64_t> seed; // step i draws with seed + i; unset: a random seed

  // The penalties change the logits of tokens that occurred among the last LlmMetadata::history tokens of prompt and
  // answer.
  float repetition_penalty = 1; // divides positive logits and multiplies negative ones; greater than 0; 1: no change
  float presence_penalty = 0; // subtracted once; 0: no change
  float frequency_penalty = 0; // subtracted once per occurrence; 0: no change

  std::vector<std::pair<int64_t, float>> logit_bias; // token id, and the value added to its logit
  AllowedTokens allowed_tokens; // called before every draw; empty: all tokens are allowed
};

struct GenerateConfig {
  SamplingParameters sampling;
  int64_t max_new_tokens = 128; // maximum length of the answer; at least 1
  std::vector<int64_t> stop_ids; // tokens that end the answer, in addition to LlmMetadata::eos_ids
  // Strings that end the answer. Each has at least one character. Only for programs with LlmMetadata::has_token_bytes.
  std::vector<std::string> stop;
  bool ignore_eos = false; // do not stop at LlmMetadata::eos_ids
};

// Why an answer ended. to_string() returns the names that the Python API and the CLI use as well.
enum class FinishReason {
  kStop, // "stop": a stop id was drawn, or a stop string occurred
  kLength, // "length": the answer has max_new_tokens tokens
  kContext, // "context": the KV cache is full
  kCancelled, // "cancelled": by cancel(), or the callback returned false
  kError, // "error": a step failed. generate() throws LlmError in this case and returns no result.
};
inline constexpr FinishReason kFinishReasons[] = {
    FinishReason::kStop,
    FinishReason::kLength,
    FinishReason::kContext,
    FinishReason::kCancelled,
    FinishReason::kError,
};
const char* to_string(FinishReason reason);

// Token counts, and seconds spent in the model. The time spent in callbacks is not included.
struct Timings {
  int64_t prompt_tokens = 0; // tokens that the prefill processed
  int64_t decoded_tokens = 0; // tokens drawn by decode steps; the prefill draws the first token of the answer
  double time_to_first_token = 0; // from the call of generate() to the first token
  double prefill = 0; // seconds in the prefill
  double decode = 0; // seconds in decode steps

  // Tokens per second, or 0 if no tokens were processed.
  double prefill_tokens_per_second() const;
  double decode_tokens_per_second() const;
};

struct GenerateResult {
  std::vector<int64_t> tokens; // the answer, without the stop id
  // The text of the answer, without the stop string: all text that the callback received, followed by the text held
  // back until the end, which is a possible beginning of a stop string, or U+FFFD for an incomplete character. Empty if
  // the program has no token bytes.
  std::string text;
  FinishReason finish = FinishReason::kLength;
  std::optional<int64_t> stop_id; // the stop id that ended the answer
  std::optional<std::string> stop_string; // the stop string that ended the answer
  std::optional<int64_t> seed; // the seed of the first token; unset if the head drew the tokens and accepts no seed
  Timings timings;
};

// Receives each new token and the text that the token completes: whole characters only, and no text that may turn out
// to be part of a stop string. Returns whether to continue.
using TokenCallback = std::function<bool(int64_t token, std::string_view text)>;

// A TokenCallback for generate_batch(). `sequence` is the index of the prompt. Returning false ends only the answer to
// this prompt.
using BatchTokenCallback = std::function<bool(size_t sequence, int64_t token, std::string_view text)>;

// Returns a random seed of 0 or more.
int64_t random_seed();

// Returns the peak resident memory of this process, in bytes.
int64_t peak_resident_bytes();

class LlmRunner {
 public:
  // Loads the program in the file `path`.
  //
  // `device` is "cpu", "gpu" or "". The empty string means the device that the environment variable
  // EXECUTORCH_MLX_DEVICE names, or MLX's default device if the variable is not set. `tracer` may be null. Otherwise
  // the tracer records the time of every instruction, which slows execution down, and must outlive the runner.
  //
  // Throws LlmArgumentError if the file cannot be read or the device is unknown, LlmMemoryError if the program does not
  // fit into memory, LlmError if the file is not a valid language model.
  explicit LlmRunner(
      const std::string& path,
      const std::string& device = "",
      executorch::runtime::EventTracer* tracer = nullptr);
  ~LlmRunner();
  LlmRunner(const LlmRunner&) = delete;
  LlmRunner& operator=(const LlmRunner&) = delete;

  const LlmMetadata& metadata() const;

  // How long the constructor took, in seconds.
  double load_seconds() const;

  // Returns the bytes of a token: UTF-8, possibly only a part of a character. Special tokens have no bytes. The view is
  // valid as long as the runner exists. Throws LlmArgumentError if the id is out of range or the program has no token
  // bytes.
  std::string_view token_bytes(int64_t token) const;

  // Appends `prompt` to the context and generates an answer.
  //
  // The last token that was drawn, which may be a stop id, is not in the KV cache yet. To continue the conversation,
  // begin the next prompt with this token. If the program has several sequences, it processes the same tokens in all of
  // them.
  //
  // Throws LlmArgumentError if the request is invalid, before anything runs. Throws LlmError if a step fails; after
  // that, call reset() before the next request. If the error is an LlmMemoryError, rewind() to the position before the
  // request works too, and keeps the conversation.
  GenerateResult generate(
      std::span<const int64_t> prompt,
      const GenerateConfig& config,
      const TokenCallback& on_token = {});

  // Answers up to LlmMetadata::batch_size prompts side by side and returns the results in the order of the prompts.
  //
  // Empties the KV cache at the beginning and at the end. All sequences use the same seed, but the noise of each
  // sequence is different. Throws the same errors as generate().
  std::vector<GenerateResult> generate_batch(
      std::span<const std::vector<int64_t>> prompts,
      const GenerateConfig& config,
      const BatchTokenCallback& on_token = {});

  // Ends the running answer before its next step. Has no effect if no answer is running. May be called from any thread
  // and from a signal handler.
  void cancel() noexcept;

  // The number of positions in use in the KV cache.
  int64_t position() const;

  // Discards all positions of the KV cache from `position` on, so that another prompt can take their place. `position`
  // must be 0, or from position() - LlmMetadata::max_rewind to position(); otherwise this throws LlmArgumentError.
  void rewind(int64_t position);

  // Empties the KV cache.
  void reset();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

} // namespace executorch_mlx
