#include "json.h"

#include <cstdio>
#include <optional>
#include <vector>

#include "text.h"

namespace executorch_mlx {

namespace {

// UTF-8 stays as it is.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", c);
      result += escaped;
    } else {
      result += c;
    }
  }
  return result + "\"";
}

std::string list(const std::vector<int64_t>& ids) {
  std::string text;
  for (const int64_t id : ids) {
    text += str(text.empty() ? "" : ", ", id);
  }
  return "[" + text + "]";
}

std::string number_or_null(const std::optional<int64_t>& number) {
  return number ? str(*number) : "null";
}

} // namespace

std::string token_line(size_t row, int64_t id, std::string_view text) {
  return str("{\"row\": ", row, ", \"token\": ", id, ", \"text\": ", quoted(text), "}\n");
}

std::string answer_line(size_t row, const GenerateResult& result, double load_seconds) {
  const Timings& t = result.timings;
  return str(
      "{\"row\": ", row, ", \"tokens\": ", list(result.tokens), ", \"text\": ", quoted(result.text),
      ", \"finish\": ", quoted(to_string(result.finish)), ", \"stop_id\": ", number_or_null(result.stop_id),
      ", \"seed\": ", number_or_null(result.seed), ", \"prompt_tokens\": ", t.prompt_tokens,
      ", \"decoded_tokens\": ", t.decoded_tokens, ", \"load_seconds\": ", load_seconds,
      ", \"time_to_first_token\": ", t.time_to_first_token, ", \"prefill_seconds\": ", t.prefill,
      ", \"decode_seconds\": ", t.decode, ", \"prefill_tokens_per_second\": ", t.prefill_tokens_per_second(),
      ", \"decode_tokens_per_second\": ", t.decode_tokens_per_second(),
      ", \"peak_resident_bytes\": ", peak_resident_bytes(), "}\n");
}

} // namespace executorch_mlx
