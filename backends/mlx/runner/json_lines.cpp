#include "json_lines.h"

#include <cstdio>
#include <optional>
#include <vector>

#include "check.h"

namespace executorch_mlx {

namespace {

// Returns `text` as a JSON string. Non-ASCII characters are not escaped.
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

std::string array(const std::vector<int64_t>& ids) {
  std::string items;
  for (const int64_t id : ids) {
    items += str(items.empty() ? "" : ", ", id);
  }
  return "[" + items + "]";
}

std::string number_or_null(const std::optional<int64_t>& number) {
  return number ? str(*number) : "null";
}

std::string string_or_null(const std::optional<std::string>& text) {
  return text ? quoted(*text) : "null";
}

} // namespace

std::string token_line(size_t sequence, int64_t id, std::string_view text) {
  return str("{\"sequence\": ", sequence, ", \"token\": ", id, ", \"text\": ", quoted(text), "}\n");
}

std::string answer_line(size_t sequence, const GenerateResult& result, double load_seconds) {
  const Timings& t = result.timings;
  return str(
      "{\"sequence\": ", sequence, ", \"tokens\": ", array(result.tokens), ", \"text\": ", quoted(result.text),
      ", \"finish\": ", quoted(to_string(result.finish)), ", \"stop_id\": ", number_or_null(result.stop_id),
      ", \"stop_string\": ", string_or_null(result.stop_string), ", \"seed\": ", number_or_null(result.seed),
      ", \"prompt_tokens\": ", t.prompt_tokens, ", \"decoded_tokens\": ", t.decoded_tokens,
      ", \"load_seconds\": ", load_seconds, ", \"time_to_first_token\": ", t.time_to_first_token,
      ", \"prefill_seconds\": ", t.prefill, ", \"decode_seconds\": ", t.decode,
      ", \"prefill_tokens_per_second\": ", t.prefill_tokens_per_second(),
      ", \"decode_tokens_per_second\": ", t.decode_tokens_per_second(),
      ", \"peak_resident_bytes\": ", peak_resident_bytes(), "}\n");
}

} // namespace executorch_mlx
