#include "answer_builder.h"

#include <algorithm>

namespace executorch_mlx {

AnswerBuilder::AnswerBuilder(const LlmProgram& program, const GenerateConfig& config)
    : program_(program), config_(config), stop_(config.stop) {}

bool AnswerBuilder::is_stop_id(int64_t token) const {
  const auto contains = [&](const std::vector<int64_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  return contains(config_.stop_ids) || (!config_.ignore_eos && contains(program_.metadata().eos_ids));
}

// Takes new text of the answer. Appends to `out` the text that can be shown now, and stores a stop string that occurs.
void AnswerBuilder::take_text(std::string_view text, std::string& out) {
  if (const std::string* found = stop_.feed(text, out)) {
    result.stop_string = *found;
  }
}

// Flushes the text that was held back, then ends the answer. The finish reason is `reason`, or kStop if the answer now
// contains a stop string.
void AnswerBuilder::end(FinishReason reason) {
  is_over_ = true;
  if (!result.stop_string) { // text after a stop string is not part of the answer
    std::string rest;
    utf8_.finish(rest);
    take_text(rest, result.text);
    result.text += stop_.finish();
  }
  result.finish = result.stop_string ? FinishReason::kStop : reason;
}

void AnswerBuilder::cancel() {
  if (!is_over_) {
    end(FinishReason::kCancelled);
  }
}

void AnswerBuilder::take(int64_t token, bool has_room, const TokenCallback& on_token) {
  if (is_stop_id(token)) {
    result.stop_id = token;
    return end(FinishReason::kStop);
  }
  result.tokens.push_back(token);
  std::string text;
  if (program_.metadata().has_token_bytes) {
    std::string characters;
    utf8_.feed(program_.token_bytes(token), characters);
    take_text(characters, text);
  }
  result.text += text;
  const bool wants_more = !on_token || on_token(token, text);
  if (result.stop_string) {
    end(FinishReason::kStop);
  } else if (!wants_more) {
    end(FinishReason::kCancelled);
  } else if (static_cast<int64_t>(result.tokens.size()) == config_.max_new_tokens) {
    end(FinishReason::kLength);
  } else if (!has_room) {
    end(FinishReason::kContext);
  }
}

} // namespace executorch_mlx
