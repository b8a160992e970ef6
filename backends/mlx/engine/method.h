// A method of a language model: its inputs, and a call. docs/llm-program.md specifies the methods.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch_mlx/deferred.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "metadata.h"
#include "method_checker.h"
#include "options.h"
#include "profile.h"

namespace executorch_mlx::engine {

// What a call does for one request: it adds tokens to a row.
struct RowTask {
  std::span<const int64_t> tokens;
  int64_t position = 0; // of the first token
  int64_t row = 0;
  int64_t adapter = 0; // the slot of the adapter; 0: none
  std::span<const float> embeddings = {}; // of the tokens, in place of the program's own; empty: none
  int64_t rope_offset = 0; // from a position in the row to the rotary position
  std::span<const int64_t> rope_positions = {}; // [3, tokens], with embeddings
  int64_t row_length = 0; // for the method draft: how many positions of the row the main model has written
  // The fields below say how to draw. They have no effect on a method that returns logits.
  const SamplingParameters* sampling = nullptr; // null: greedy
  int64_t seed = 0;
  std::span<const int32_t> allowed_tokens = {}; // ceil(V / 32) words per draw; empty: all tokens are allowed
  bool wants_logprobs = false;
  std::span<const int64_t> targets = {}; // for the method verify: targets[i] is the token whose log probability
                                         // after tokens[i] is wanted; empty: none
  bool timestamps = false; // whether timestamps may be drawn
};

// The outputs of a call. With `pending`, the device may still compute them.
struct Outputs {
  struct Free {
    void operator()(executorch_mlx_deferred* call) const { executorch_mlx_deferred_free(call); }
  };
  std::vector<executorch::runtime::EValue> values;
  std::unique_ptr<executorch_mlx_deferred, Free> pending;
};

class Method {
 public:
  enum class Kind {
    kLogits, // returns the logits after the last token
    kDraw, // returns the token that is drawn after the last token
    kVerify, // returns the token that is drawn after each token
    kDraft, // returns the token that the head for multi-token prediction draws after the last token
    kRewind, // returns to the states after the tokens, and returns the next position
  };
  enum class Form {
    kPlain,
    kAdapted, // each task has an adapter
    kEmbedded, // takes the embeddings of the tokens
  };

  // Checks the signature against the metadata. `max_tasks` is 1, or for a method that takes one token of each of
  // several rows, the number of these rows. A call that fails sets `is_undefined` if the mutable buffers of the program
  // are undefined afterwards. All references must outlive the method. Throws EngineError.
  Method(executorch::extension::Module& module, const std::string& path, const LlmMetadata& metadata,
      const std::string& name, Kind kind, int64_t max_tasks, Form form, Profile* profile, bool& is_undefined);
  Method(const Method&) = delete;
  Method& operator=(const Method&) = delete;

  const std::string& name() const { return name_; }
  int64_t max_tokens() const { return max_tokens_; }
  size_t max_tasks() const { return static_cast<size_t>(max_tasks_); }
  size_t num_outputs() const { return num_outputs_; }
  bool is_embedded() const { return form_ == Form::kEmbedded; }
  // Whether the method is one call of MLXBackend and nothing else. Its mutable buffers are then MLX arrays.
  bool is_one_mlx_call() const { return is_one_mlx_call_; }

  // Loads the method unless it is loaded.
  void load();

  // Frees what only this method holds: also its mutable buffers, unless other loaded methods have them, too. Returns
  // whether it was loaded. Outputs of the method are invalid afterwards.
  bool unload();

  // Runs the method for 1 to max_tasks tasks. If there are fewer, copies of the first one fill the rest. Returns the
  // outputs, whose memory is valid until the next call. Throws EngineError.
  std::vector<executorch::runtime::EValue> run(std::span<const RowTask> tasks);

  // Like run(), but may return before the outputs are computed. `source` is null, or the outputs of a pending call of
  // this or another method. With `source`, each task must have exactly one token, whose value is ignored: the token of
  // task i is element sources[i] of the first output of `source`.
  Outputs submit(std::span<const RowTask> tasks, const Outputs* source, std::span<const size_t> sources);

  // Waits until the outputs are computed. Throws EngineError.
  void finish(Outputs& outputs);

 private:
  std::vector<MethodInput> make_inputs() const;
  void add_head_inputs(std::vector<MethodInput>& inputs) const;
  executorch::runtime::Result<std::vector<executorch::runtime::EValue>> execute();
  void resize(size_t tokens);

  executorch::extension::Module& module_;
  const std::string& path_;
  const LlmMetadata& metadata_;
  std::string name_;
  Kind kind_;
  int64_t max_tasks_;
  Form form_;
  Profile* profile_;
  bool& is_undefined_;
  int64_t mask_words_; // of one draw; 0: the method takes no mask
  int64_t max_tokens_ = 1; // of one task
  int64_t width_ = 0; // of an embedding
  size_t num_outputs_ = 0;
  bool is_one_mlx_call_ = false;
  std::vector<MethodInput> inputs_;
  std::vector<executorch::extension::TensorPtr> tensors_; // of the inputs
  std::vector<executorch::runtime::EValue> arguments_;
};

} // namespace executorch_mlx::engine
