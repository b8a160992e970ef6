#include "json_lines.h"

#include <sys/resource.h>

#include <cstdio>
#include <vector>

#include "str.h"

namespace executorch_mlx::engine {

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

double rate(int64_t count, double seconds) {
  return count > 0 && seconds > 0 ? static_cast<double>(count) / seconds : 0;
}

} // namespace

std::string token_line(size_t sequence, int64_t id, std::string_view text) {
  return str("{\"sequence\": ", sequence, ", \"token\": ", id, ", \"text\": ", quoted(text), "}\n");
}

std::string answer_line(size_t sequence, const Answer& answer, double load_seconds) {
  const executorch_mlx_request_info& i = answer.info;
  const auto optional = [](bool has_value, int64_t value) { return has_value ? str(value) : "null"; };
  return str("{\"sequence\": ", sequence, ", \"tokens\": ", array(answer.tokens), ", \"text\": ", quoted(answer.text),
      ", \"finish\": ", quoted(to_string(i.finish)), ", \"stop_id\": ", optional(i.stop_id >= 0, i.stop_id),
      ", \"stop_string\": ", answer.stop_string ? quoted(*answer.stop_string) : "null",
      ", \"seed\": ", optional(i.has_seed, i.seed), ", \"prompt_tokens\": ", i.prompt_tokens,
      ", \"generated_tokens\": ", i.generated_tokens, ", \"drafted_tokens\": ", i.drafted_tokens,
      ", \"accepted_tokens\": ", i.accepted_tokens, ", \"calls\": ", i.calls, ", \"load_seconds\": ", load_seconds,
      ", \"queue_seconds\": ", i.queue_seconds, ", \"prompt_seconds\": ", i.prompt_seconds,
      ", \"generation_seconds\": ", i.generation_seconds,
      ", \"prompt_tokens_per_second\": ", answer.prompt_tokens_per_second(),
      ", \"decode_tokens_per_second\": ", answer.decode_tokens_per_second(),
      ", \"peak_resident_bytes\": ", peak_resident_bytes(), "}\n");
}

double Answer::prompt_tokens_per_second() const {
  return rate(info.prompt_tokens - info.reused_tokens, info.prompt_seconds);
}

double Answer::decode_tokens_per_second() const { return rate(info.generated_tokens - 1, info.generation_seconds); }

int64_t peak_resident_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
  return usage.ru_maxrss;
#else
  return int64_t{usage.ru_maxrss} * 1024; // Linux reports KiB
#endif
}

} // namespace executorch_mlx::engine
