#include "answer.h"

#include <algorithm>

#include "text.h"

namespace executorch_mlx {

namespace {

// How much of the end of `text` may be the beginning of `stop`.
size_t overlap(std::string_view text, std::string_view stop) {
  for (size_t n = std::min(text.size(), stop.size() - 1); n > 0; --n) {
    if (text.ends_with(stop.substr(0, n))) {
      return n;
    }
  }
  return 0;
}

} // namespace

StopText::StopText(const std::vector<std::string>& stop) : stop_(stop) {
  for (const std::string& text : stop) {
    check_argument(!text.empty(), "stop: an empty text, expected at least one character");
  }
}

bool StopText::feed(std::string_view text, std::string& out) {
  held_ += text;
  size_t first = std::string::npos;
  size_t keep = 0;
  for (const std::string& stop : stop_) {
    first = std::min(first, held_.find(stop));
    keep = std::max(keep, overlap(held_, stop));
  }
  if (first != std::string::npos) {
    out += held_.substr(0, first);
    held_.clear();
    return true;
  }
  out += held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return false;
}

std::string StopText::finish() {
  return std::exchange(held_, {});
}

Answer::Answer(const LlmProgram& program, const GenerateConfig& config)
    : program_(program), config_(config), stop_(config.stop) {
  const LlmMetadata& meta = program.metadata();
  check_argument(
      config.max_new_tokens >= 1, "max_new_tokens: ", config.max_new_tokens, ", expected at least 1");
  for (const int64_t id : config.stop_ids) {
    check_argument(
        0 <= id && id < meta.vocab_size,
        "stop_ids: id ", id, " is outside the vocabulary [0, ", meta.vocab_size, ")");
  }
  check_argument(
      config.stop.empty() || meta.has_tokens, "stop: the program carries no bytes of its tokens, so there is no text");
  result.finish = FinishReason::kCancelled;
}

bool Answer::stops_at(int64_t token) const {
  const auto in = [&](const std::vector<int64_t>& ids) {
    return std::find(ids.begin(), ids.end(), token) != ids.end();
  };
  return in(config_.stop_ids) || (!config_.ignore_eos && in(program_.metadata().eos_ids));
}

void Answer::end(FinishReason reason) {
  result.finish = reason;
  is_over_ = true;
  std::string rest;
  utf8_.finish(rest);
  if (reason != FinishReason::kStopText && stop_.feed(rest, result.text)) {
    result.finish = FinishReason::kStopText;
  }
  result.text += stop_.finish();
}

void Answer::cancel() {
  if (!is_over_) {
    end(FinishReason::kCancelled);
  }
}

void Answer::take(int64_t token, bool has_room, const TokenCallback& on_token) {
  if (stops_at(token)) {
    result.stop_id = token;
    return end(FinishReason::kStopId);
  }
  result.tokens.push_back(token);
  std::string whole;
  std::string text;
  bool is_stopped = false;
  if (program_.metadata().has_tokens) {
    utf8_.feed(program_.token_bytes(token), whole);
    is_stopped = stop_.feed(whole, text);
  }
  result.text += text;
  const bool goes_on = !on_token || on_token(token, text);
  if (is_stopped) {
    end(FinishReason::kStopText);
  } else if (!goes_on) {
    end(FinishReason::kCancelled);
  } else if (static_cast<int64_t>(result.tokens.size()) == config_.max_new_tokens) {
    end(FinishReason::kMaxNewTokens);
  } else if (!has_room) {
    end(FinishReason::kContextFull);
  }
}

} // namespace executorch_mlx
