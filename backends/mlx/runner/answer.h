// What the tokens of one row add up to, and when that ends.
#pragma once

#include <executorch_mlx/llm_runner.h>
#include <executorch_mlx/utf8_stream.h>

#include <functional>
#include <string>
#include <string_view>

#include "llm_program.h"

namespace executorch_mlx {

// Text up to the first of some strings, of which no part is let out.
class StopText {
 public:
  // Throws LlmArgumentError for an empty one.
  explicit StopText(const std::vector<std::string>& stop);

  // Appends to `out` what `text` lets out; returns whether one of them came.
  bool feed(std::string_view text, std::string& out);

  // Nothing more comes: what was held back.
  std::string finish();

 private:
  const std::vector<std::string>& stop_;
  std::string held_; // may be the beginning of one
};

class Answer {
 public:
  // What ends an answer is checked: LlmArgumentError. Both have to outlive it.
  Answer(const LlmProgram& program, const GenerateConfig& config);

  bool is_over() const {
    return is_over_;
  }

  // `has_room`: whether the context can take the token in. `on_token` may be empty.
  void take(int64_t token, bool has_room, const TokenCallback& on_token);

  void cancel();

  GenerateResult result;

 private:
  bool stops_at(int64_t token) const;
  void end(FinishReason reason);

  const LlmProgram& program_;
  const GenerateConfig& config_;
  Utf8Stream utf8_;
  StopText stop_;
  bool is_over_ = false;
};

} // namespace executorch_mlx
