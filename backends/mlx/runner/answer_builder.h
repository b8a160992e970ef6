// The answer of one sequence, built while its tokens are drawn.
#pragma once

#include <executorch_mlx/llm_runner.h>
#include <executorch_mlx/utf8_stream.h>

#include "llm_program.h"
#include "stop_strings.h"

namespace executorch_mlx {

// Collects the tokens and the text of an answer, and detects its end.
class AnswerBuilder {
 public:
  // `config` must have passed check_config(). Both arguments must outlive the builder.
  AnswerBuilder(const LlmProgram& program, const GenerateConfig& config);

  bool is_over() const {
    return is_over_;
  }

  // Adds a drawn token and calls `on_token`, which may be empty. A stop id ends the answer instead: it is not added,
  // and `on_token` is not called. `has_room` says whether the KV cache has a position left for the token; if there is
  // none, the answer ends after this token.
  void take(int64_t token, bool has_room, const TokenCallback& on_token);

  // Ends the answer as cancelled, unless it is over.
  void cancel();

  GenerateResult result;

 private:
  bool is_stop_id(int64_t token) const;
  void take_text(std::string_view text, std::string& out);
  void end(FinishReason reason);

  const LlmProgram& program_;
  const GenerateConfig& config_;
  Utf8Stream utf8_;
  StopStringFilter stop_;
  bool is_over_ = false;
};

} // namespace executorch_mlx
