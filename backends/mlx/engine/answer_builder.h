// The answer to a request, built while its tokens are drawn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "llm_program.h"
#include "options.h"
#include "stop_strings.h"
#include "utf8_stream.h"

namespace executorch_mlx::engine {

// What one token adds to an answer.
struct Piece {
  std::string text = {};
  executorch_mlx_finish finish = EXECUTORCH_MLX_RUNNING;
  int32_t stop_index = -1; // index in RequestOptions::stop of the string that ended the answer; -1: none
};

// Turns tokens into text, and detects the end of the answer.
class AnswerBuilder {
 public:
  // `options` must have passed check_options(). Both arguments must outlive the builder.
  AnswerBuilder(const LlmProgram& program, const RequestOptions& options);

  // Adds a drawn token. A stop id ends the answer and is not part of it. `has_room` says whether the row has a position
  // left for the token; if there is none, the answer ends after this token.
  Piece take(int64_t token, bool has_room);

  // Ends the answer without a new token. The piece has the text that was held back. Its finish is `reason`, or STOP if
  // the answer now contains a stop string.
  Piece end(executorch_mlx_finish reason);

  bool is_stop_id(int64_t token) const;

  // The stop ids that may not be drawn after `length` tokens of the answer, because it would be too short.
  std::span<const int64_t> prevented_stop_ids(size_t length) const;

  // The tokens of the answer, without a stop id.
  const std::vector<int64_t>& tokens() const { return tokens_; }

 private:
  void take_text(std::string_view text, Piece& piece);

  const LlmProgram& program_;
  const RequestOptions& options_;
  const std::vector<int64_t> stop_ids_;
  std::vector<int64_t> tokens_;
  Utf8Stream utf8_;
  StopStringFilter stop_;
};

} // namespace executorch_mlx::engine
