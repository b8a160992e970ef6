#include "answer_builder.h"

#include <algorithm>

namespace executorch_mlx::engine {

AnswerBuilder::AnswerBuilder(const LlmProgram& program, const RequestOptions& options)
    : program_(program), options_(options), stop_(options.stop) {}

bool AnswerBuilder::is_stop_id(int64_t token) const {
  const auto contains = [&](const std::vector<int64_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  return contains(options_.stop_ids) || (!options_.ignore_eos && contains(program_.metadata().eos_ids));
}

// Adds to the piece the part of `text`, and of the text held back before, that cannot belong to a stop string. A stop
// string ends the answer.
void AnswerBuilder::take_text(std::string_view text, Piece& piece) {
  if (const std::string* found = stop_.feed(text, piece.text)) {
    piece.finish = EXECUTORCH_MLX_STOP;
    piece.stop_index = static_cast<int32_t>(found - options_.stop.data());
  }
}

Piece AnswerBuilder::end(executorch_mlx_finish reason) {
  Piece piece;
  std::string rest;
  utf8_.finish(rest);
  take_text(rest, piece);
  if (piece.finish == EXECUTORCH_MLX_RUNNING) {
    piece.text += stop_.finish();
    piece.finish = reason;
  }
  return piece;
}

Piece AnswerBuilder::take(int64_t token, bool has_room) {
  if (is_stop_id(token)) {
    Piece piece = {.text = stop_.finish(), .finish = EXECUTORCH_MLX_STOP};
    utf8_.finish(piece.text);
    return piece;
  }
  tokens_.push_back(token);
  Piece piece;
  if (program_.has_token_bytes()) {
    std::string characters;
    utf8_.feed(program_.token_bytes(token), characters);
    take_text(characters, piece);
  }
  const bool is_full = static_cast<int64_t>(tokens_.size()) == options_.max_new_tokens; // 0: no limit
  if (piece.finish == EXECUTORCH_MLX_RUNNING && (is_full || !has_room)) {
    Piece last = end(is_full ? EXECUTORCH_MLX_LENGTH : EXECUTORCH_MLX_CONTEXT);
    last.text.insert(0, piece.text);
    return last;
  }
  return piece;
}

} // namespace executorch_mlx::engine
