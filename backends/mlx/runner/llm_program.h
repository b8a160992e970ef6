// A loaded program of a language model. docs/llm-program.md specifies such programs. The constructor validates the
// program.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "metadata.h"
#include "method_checker.h"

namespace executorch_mlx {

// The tokens of one call.
struct Chunk {
  std::span<const int64_t> tokens; // [B, S], row-major
  int64_t position; // of the first token of each sequence
  std::span<const int64_t> padding; // [B]; the number of padding positions at the left of each sequence
};

class LlmProgram {
 public:
  // The arguments and the errors are those of LlmRunner's constructor.
  LlmProgram(const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer);
  LlmProgram(const LlmProgram&) = delete;
  LlmProgram& operator=(const LlmProgram&) = delete;

  const LlmMetadata& metadata() const {
    return metadata_;
  }
  std::string_view token_bytes(int64_t token) const; // as in LlmRunner

  // Returns the name of a parameter that `sampling` enables but the head does not accept, or null if there is none.
  const char* unsupported_parameter(const SamplingParameters& sampling) const;

  // Sets the inputs of the head to these parameters, except seed and allowed_tokens.
  void set_sampling(const SamplingParameters& sampling);

  // The mask of allowed tokens for the next call of draw(): [B, ceil(V / 32)], one bit for each token id. All bits are
  // set at the beginning. Every call of draw() sets all bits again when it is done.
  std::span<int32_t> allowed_tokens() {
    return values_.allowed_tokens;
  }

  // Runs the method that returns tokens. Returns the token that was drawn for each sequence, [B].
  std::vector<int64_t> draw(const Chunk& chunk, int64_t seed);

  // Runs the method that returns logits. Returns the logits of the last token of each sequence, [B, V].
  std::vector<float> logits(const Chunk& chunk);

 private:
  // The memory behind the input tensors.
  struct InputValues {
    std::vector<int64_t> tokens;
    int64_t position = 0;
    std::vector<int64_t> start;
    float temperature = 0;
    float top_p = 1;
    int64_t seed = 0;
    int64_t top_k = 0;
    float min_p = 0;
    float repetition_penalty = 1;
    float presence_penalty = 0;
    float frequency_penalty = 0;
    std::vector<int64_t> bias_tokens;
    std::vector<float> bias_values;
    std::vector<int32_t> allowed_tokens;
  };

  void allocate_inputs();
  std::vector<MethodInput> model_inputs();
  std::vector<MethodInput> head_inputs();
  void add_tensors(const std::vector<MethodInput>& inputs, std::vector<executorch::runtime::EValue>& arguments);
  void load_method(const std::string& method);
  executorch::runtime::EValue execute(
      const std::string& method, const Chunk& chunk, const std::vector<executorch::runtime::EValue>& arguments);

  std::string path_;
  executorch::runtime::EventTracer* tracer_;
  std::unique_ptr<executorch::extension::Module> module_;
  LlmMetadata metadata_;
  TokenTable token_table_;
  std::string draw_method_; // empty: the program has no head
  std::string logits_method_; // empty: the program does not return logits

  InputValues values_;
  std::vector<executorch::extension::TensorPtr> tensors_; // views of values_; tensors_[0] are the tokens
  std::vector<executorch::runtime::EValue> logits_arguments_;
  std::vector<executorch::runtime::EValue> draw_arguments_;
};

} // namespace executorch_mlx
