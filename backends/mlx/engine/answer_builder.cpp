#include "answer_builder.h"

#include <algorithm>

namespace executorch_mlx::engine {

AnswerBuilder::AnswerBuilder(const LlmProgram& program, const RequestOptions& options)
    : program_(program), options_(options), stop_ids_(program.stop_ids(options)), stop_(options.stop) {}

bool AnswerBuilder::is_stop_id(int64_t token) const {
  return std::find(stop_ids_.begin(), stop_ids_.end(), token) != stop_ids_.end();
}

std::span<const int64_t> AnswerBuilder::prevented_stop_ids(size_t length) const {
  const bool is_short = static_cast<int64_t>(length) < options_.min_new_tokens;
  return is_short ? std::span(stop_ids_) : std::span<const int64_t>();
}

// Adds to the piece the part of `text`, and of the text held back before, that cannot belong to a stop string. A stop
// string ends the answer. It begins after the text of the first min_new_tokens tokens.
void AnswerBuilder::take_text(std::string_view text, Piece& piece) {
  if (static_cast<int64_t>(tokens_.size()) <= options_.min_new_tokens) {
    piece.text += text;
    return;
  }
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
