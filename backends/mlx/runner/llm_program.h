// One loaded .pte of a language model, by docs/llm-program.md: checked at load, called
// with plain values.
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

#include "constants.h"

namespace executorch_mlx {

// Tokens [B, S] one row after the other, at `position` of the caches; `start` [B] is
// where each row begins.
struct Piece {
  std::span<const int64_t> tokens;
  int64_t position;
  std::span<const int64_t> start;
};

class LlmProgram {
 public:
  LlmProgram(const std::string& path, const std::string& device, executorch::runtime::EventTracer* tracer);
  LlmProgram(const LlmProgram&) = delete;
  LlmProgram& operator=(const LlmProgram&) = delete;

  const LlmMetadata& metadata() const {
    return metadata_;
  }
  std::string_view token_bytes(int64_t token) const;

  // What is on in `sampling` and the head does not take, by name; null: nothing.
  const char* not_taken(const Sampling& sampling) const;

  // The parameters of the head from now on, but for the seed and the mask.
  void set_sampling(const Sampling& sampling);

  // The mask of the next draw, [B, words], all bits set after it.
  std::span<int32_t> allowed_tokens() {
    return inputs_.allowed_tokens;
  }

  // One call of the method with the head: the token of every row, [B].
  std::vector<int64_t> draw(const Piece& piece, int64_t seed);

  // One call of the method with logits: those of the last token, [B, V].
  std::vector<float> logits(const Piece& piece);

 private:
  // What the methods are given; the tensors are views of it.
  struct Inputs {
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
  struct Input {
    const char* name;
    executorch::aten::ScalarType type;
    std::vector<executorch::aten::SizesType> sizes;
    void* data;
  };

  std::vector<Input> position_inputs();
  std::vector<Input> head_inputs();
  void check_method(const std::string& name, const std::vector<Input>& inputs) const;
  void check_output(const std::string& name, bool is_token) const;
  void bind(const std::vector<Input>& inputs, std::vector<executorch::runtime::EValue>& values);
  void load(const std::string& method);
  executorch::runtime::EValue execute(
      const std::string& method, const Piece& piece, const std::vector<executorch::runtime::EValue>& values);

  std::string path_;
  executorch::runtime::EventTracer* tracer_;
  std::unique_ptr<executorch::extension::Module> module_;
  LlmMetadata metadata_;
  TokenTable table_;
  std::string head_; // the methods; empty: there is none
  std::string logits_;

  Inputs inputs_;
  std::vector<executorch::extension::TensorPtr> tensors_; // the first are the tokens
  std::vector<executorch::runtime::EValue> logits_values_;
  std::vector<executorch::runtime::EValue> head_values_;
};

} // namespace executorch_mlx
