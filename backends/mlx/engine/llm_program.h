// A loaded program of a language model. docs/llm-program.md specifies such programs.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch_mlx/buffers.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metadata.h"
#include "method.h"
#include "profile.h"

namespace executorch_mlx::engine {

// A drawn token. Unless log probabilities were asked for, `logprob` is 0 and the lists are empty.
struct Drawn {
  int64_t token = 0;
  float logprob = 0;
  std::vector<int64_t> top_tokens = {};
  std::vector<float> top_logprobs = {};
};

// A call that draws tokens, which the device may still compute.
struct PendingDraw {
  Method* method;
  Outputs outputs;
  size_t count; // of tasks
  bool has_logprobs;

  // Whether another call can take its tokens on the device. If not, the tokens are there already.
  bool can_be_source() const { return outputs.pending != nullptr; }
};

// What is called while a program is loaded, as in executorch_mlx.h.
struct LoadProgress {
  executorch_mlx_on_progress callback = nullptr;
  void* user_data = nullptr;
};

class LlmProgram {
 public:
  // Loads and validates the file. Of `options`, as in executorch_mlx.h, `draft` is not used. Throws EngineError.
  LlmProgram(const std::string& path, const executorch_mlx_load_options& options);
  LlmProgram(const LlmProgram&) = delete;
  LlmProgram& operator=(const LlmProgram&) = delete;

  const std::string& path() const { return path_; }
  const LlmMetadata& metadata() const { return metadata_; }
  const MetadataReader& metadata_reader() const { return *reader_; }
  bool has_token_bytes() const { return !token_table_.offsets.empty(); }
  std::string_view token_bytes(int64_t token) const;
  // Gives a program the bytes of its tokens, as in executorch_mlx.h.
  void set_token_bytes(std::span<const uint8_t> bytes, std::span<const int64_t> offsets);

  // Whether all mutable buffers of the program are MLX arrays, so that the functions of
  // executorch_mlx/buffers.h can copy, read and write its whole state.
  bool has_only_mlx_state() const;
  bool runs_on_cpu() const { return runs_on_cpu_; }
  bool has_low_priority() const { return has_low_priority_; }
  // The mutable buffers of all methods that are loaded now. Null unless has_only_mlx_state(), or after an error, which
  // the log describes.
  std::shared_ptr<executorch_mlx_buffers> open_buffers() const;
  // The mutable buffers of the method that reads prompts: what a prompt leaves in a row is in these. Methods that are
  // loaded later may have others, which they fill themselves. Null if open_buffers() was.
  const std::shared_ptr<executorch_mlx_buffers>& prompt_buffers() const { return prompt_buffers_; }

  // The largest number of tokens that verify() takes; 0 if the program has no such method.
  int64_t max_verify() const { return plain_.verify ? plain_.verify->max_tokens() : 0; }

  // The largest number of draft tokens that verify() can check; 0 if it cannot check any, because a row could not go
  // back behind wrong ones.
  int64_t max_draft() const;

  // Whether a row can only go back by rewind(), because it has states.
  bool has_rewind() const { return rewind_ != nullptr; }
  // After a call of verify() with at most max_draft() + 1 tokens: forgets all of its tokens but those of `task`, which
  // are the first ones.
  void rewind(const RowTask& task);

  // Whether verify() returns the log probabilities of drawn tokens. Programs of earlier versions do not.
  bool verifies_logprobs() const { return plain_.verify && plain_.verify->num_outputs() >= kVerifyOutputs; }

  // Returns the token ids that end the answer to a request.
  std::vector<int64_t> stop_ids(const RequestOptions& options) const;

  // Returns the name of a parameter that a request enables but the head does not accept, or null if there is none.
  const char* unsupported_parameter(const RequestOptions& options) const;

  // The number of rows of the method that decodes this number of rows at once.
  size_t decode_width(size_t rows) const;

  // The layers that take adapters, with their sizes; empty if the program takes none.
  struct AdaptedLayer {
    std::string path;
    size_t inputs;
    size_t outputs;
  };
  const std::vector<AdaptedLayer>& adapted_layers() const { return adapted_layers_; }
  // Writes an adapter to a slot. `weights` has A [rank, inputs] and B [outputs, rank] of each layer, where `rank` is
  // that of the metadata. Throws EngineError.
  void write_adapter(int64_t slot, std::span<std::vector<float>> weights);

  // Draws the next token of each task. If there are several tasks, each must have exactly one token, and no two the
  // same row.
  std::vector<Drawn> draw(std::span<const RowTask> tasks);

  // Whether submit_draw() can return before the tokens are drawn, and it does no harm to discard a draw.
  bool can_defer() const;

  // Like draw(), but returns as soon as the device has its work. With `source`, an earlier call whose
  // can_be_source() is true, the token of task i is the one that `source` draws for its task sources[i]. Each task then
  // has one token, whose value is not used.
  PendingDraw submit_draw(
      std::span<const RowTask> tasks, const PendingDraw* source = nullptr, std::span<const size_t> sources = {});

  // Waits for the tokens and returns them.
  std::vector<Drawn> finish_draw(PendingDraw& draw);

  // Whether the program has a head for multi-token prediction.
  bool has_mtp_head() const { return draft_ != nullptr; }
  // Runs this head, and returns the token that it guesses. docs/llm-program.md says what the task means.
  int64_t draft(const RowTask& task);

  // Whether a call has failed and has left the mutable buffers undefined. Later calls fail until reset().
  bool is_undefined() const { return is_undefined_; }
  // Resets the mutable buffers: all rows are empty then. Throws EngineError if there is no memory for them.
  void reset();

  // Frees all that a call needs: methods, buffers and weights, until load(). All rows are empty then.
  void unload();
  // Loads the method that reads prompts, unless it is loaded. Throws EngineError.
  void load(LoadProgress progress = {});

  // Unloads the methods without which answers and prompts can be computed: verify(), draft() and rewind(). A later call
  // loads them again. What the head for multi-token prediction holds is lost. Returns whether any of them was loaded.
  bool unload_optional_methods();

  // Returns the token that is drawn after each token of the task. If the task has targets, stores
  // the log probability of each in `target_logprobs`.
  std::vector<Drawn> verify(const RowTask& task, std::vector<float>* target_logprobs = nullptr);

  // Returns the logits after the last token of each task, [V] each. If has_logits_of_rows(), there may be
  // several tasks, as for draw().
  std::vector<std::vector<float>> logits(std::span<const RowTask> tasks);

  // Runs the encoder of a speech model: the tokens of later calls are those for this sound. Throws EngineError.
  void encode(std::span<const float> samples);

  // Returns what the encoder computes for a picture, [rows, width], and the program's own embeddings of tokens.
  // Throws EngineError.
  std::vector<float> encode_picture(const Picture& picture);
  std::vector<float> embed(std::span<const int64_t> tokens);

  // Whether logits() takes several tasks.
  bool has_logits_of_rows() const { return !plain_.decodes.empty() && !metadata_.has_head; }

  // Returns compute(), a hash of the file; computes it once. Throws EngineError if the file has changed since it was
  // loaded. Thread-safe.
  uint64_t hash(const std::function<uint64_t()>& compute) const;

  // Writes the times of all calls so far. Only with `profile`.
  void write_profile(const std::string& path);

 private:
  // Of `verify`: tokens, target_logprobs, logprob, top_tokens and top_logprobs.
  static constexpr size_t kVerifyOutputs = 5;

  // The methods that run the layers of the model. Null if the program has no such method.
  struct Methods {
    std::unique_ptr<Method> draw, verify, logits;
    // decode_2, decode_4, ... and decode, in this order. They return tokens if metadata_.has_head, else logits.
    std::vector<std::unique_ptr<Method>> decodes;
  };

  bool wants_logprobs(std::span<const RowTask> tasks) const;
  std::unique_ptr<Method> make_method(
      const std::string& name, Method::Kind kind, Method::Form form = Method::Form::kPlain, int64_t tasks = 1);
  Methods make_methods(Method::Form form);
  // The methods that take embeddings.
  Methods make_embedded_methods();
  // Whether prompts can be given as tokens. If not, they are given as embeddings, one row at a time.
  bool takes_tokens() const { return plain_.draw != nullptr || plain_.logits != nullptr; }
  // The task with the embeddings of its tokens, if it has none and the program takes only these. Valid until the next
  // call.
  std::span<const RowTask> with_embeddings(std::span<const RowTask> tasks);
  // Runs a method that is not one of methods(). `what` begins the message of an error.
  std::vector<executorch::runtime::EValue> run_other(
      const char* name, const std::vector<executorch::extension::TensorPtr>& inputs, const std::string& what);
  // The same for a method with one output, `[..., width]` of floats, which it returns.
  std::vector<float> run_encoder(const char* name, std::vector<executorch::extension::TensorPtr> inputs);
  void read_adapted_layers();
  // The methods for these tasks: those with adapters if a task has one, those with embeddings if a task has some.
  Methods& methods_for(std::span<const RowTask> tasks);
  // All methods of the program.
  std::vector<Method*> methods() const;
  // The method that decodes this number of tasks: `single` for one task, else the narrowest that takes them all.
  Method& method_for(size_t tasks, const Methods& methods, const std::unique_ptr<Method>& single) const;
  std::vector<Drawn> read_drawn(const Method& method, std::span<const executorch::runtime::EValue> outputs,
      size_t expected, size_t count, bool has_logprobs) const;
  void check_token(const Method& method, int64_t token) const;

  std::string path_;
  bool runs_on_cpu_ = true;
  bool has_low_priority_ = false;
  std::unique_ptr<Profile> profile_; // null: no profile
  std::unique_ptr<executorch::extension::Module> module_;
  std::optional<MetadataReader> reader_;
  LlmMetadata metadata_;
  TokenTable token_table_;
  std::vector<uint8_t> own_bytes_; // of set_token_bytes()
  std::vector<int64_t> own_offsets_;
  std::string version_; // of the file that was loaded: which one, and when it was changed
  mutable std::mutex hashing_;
  mutable std::optional<uint64_t> hash_; // guarded by hashing_
  Methods plain_, adapted_, embedded_;
  std::vector<float> embeddings_; // of with_embeddings()
  std::vector<int64_t> rope_positions_;
  RowTask embedded_task_;
  std::unique_ptr<Method> draft_, rewind_; // null if the program has no such method
  std::vector<AdaptedLayer> adapted_layers_;
  std::shared_ptr<executorch_mlx_buffers> prompt_buffers_;
  bool is_undefined_ = false;
};

} // namespace executorch_mlx::engine
