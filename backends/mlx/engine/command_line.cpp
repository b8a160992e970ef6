#include "command_line.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <string_view>

#include "str.h"
#include "token_mask.h"

namespace executorch_mlx::engine {

namespace {

constexpr int64_t kMinInt = std::numeric_limits<int64_t>::min();
constexpr float kUnbounded = std::numeric_limits<float>::infinity();

template <typename... Parts>
[[noreturn]] void fail(const Parts&... message) {
  throw UsageError(str(message...));
}

int64_t parse_integer(std::string_view flag, const std::string& text, int64_t low) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < low) {
    const std::string expected = low == kMinInt ? "a 64-bit integer" : str("an integer of at least ", low);
    fail(flag, ": got '", text, "', expected ", expected);
  }
  return value;
}

float parse_number(std::string_view flag, const std::string& text, float low = -kUnbounded, float high = kUnbounded) {
  char* end = nullptr;
  const float value = std::strtof(text.c_str(), &end);
  const bool is_number = !text.empty() && *end == '\0' && std::isfinite(value);
  if (!is_number || value < low || value > high) {
    std::string range;
    if (std::isfinite(low)) {
      range = std::isfinite(high) ? str(" from ", low, " to ", high) : str(" of at least ", low);
    }
    fail(flag, ": got '", text, "', expected a number", range);
  }
  return value;
}

// Reads a number of bytes, such as 2GiB, 512MiB, 1.5GB or 1000000.
size_t parse_size(std::string_view flag, const std::string& text) {
  constexpr std::string_view kPrefixes = "KMGT";
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  std::string unit = text.substr(digits);
  unit.erase(0, unit.find_first_not_of(' '));
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  const size_t power = unit.empty() ? std::string_view::npos : kPrefixes.find(unit[0]);
  const bool has_prefix = power != std::string_view::npos;
  const std::string rest = has_prefix ? unit.substr(1) : unit;
  const bool is_binary = has_prefix && rest.starts_with('I');
  char* end = nullptr;
  double bytes = std::strtod(text.c_str(), &end);
  const bool is_number = digits > 0 && text[0] != '.' && text[digits - 1] != '.' && end == text.c_str() + digits;
  for (size_t i = 0; has_prefix && i <= power; ++i) {
    bytes *= is_binary ? 1024 : 1000;
  }
  const bool is_unit = rest.empty() || rest == "B" || (is_binary && (rest == "I" || rest == "IB"));
  if (!is_number || !is_unit || bytes < 1 || bytes >= 0x1p63 || (!has_prefix && bytes != std::floor(bytes))) {
    fail(flag, ": got '", text, "', expected a size such as 2GiB, 512MiB or 1000000 (bytes)");
  }
  return static_cast<size_t>(bytes);
}

// Reads token ids, separated by commas or white space.
std::vector<int64_t> parse_ids(std::string_view flag, const std::string& text) {
  constexpr std::string_view kSeparators = ", \t\r\n";
  std::vector<int64_t> ids;
  size_t begin = 0;
  while ((begin = text.find_first_not_of(kSeparators, begin)) != std::string::npos) {
    const size_t end = std::min(text.find_first_of(kSeparators, begin), text.size());
    ids.push_back(parse_integer(flag, text.substr(begin, end - begin), 0));
    begin = end;
  }
  if (ids.empty()) {
    fail(flag, ": got no token ids, expected a list such as 1,2,3");
  }
  return ids;
}

// Reads pairs ID:NUMBER, separated by commas.
std::vector<std::pair<int64_t, float>> parse_bias(std::string_view flag, const std::string& text) {
  std::vector<std::pair<int64_t, float>> bias;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string pair = text.substr(begin, end - begin);
    const size_t colon = pair.find(':');
    if (colon == std::string::npos) {
      fail(flag, ": got '", pair, "', expected ID:NUMBER");
    }
    bias.emplace_back(parse_integer(flag, pair.substr(0, colon), 0), parse_number(flag, pair.substr(colon + 1)));
    begin = end + 1;
  }
  return bias;
}

// Returns a function that allows only the tokens `ids`. The function ignores ids outside the vocabulary.
decltype(RequestOptions::allowed_tokens) allow_only(std::vector<int64_t> ids) {
  return [ids = std::move(ids)](std::span<const int64_t>, std::span<int32_t> mask) {
    std::fill(mask.begin(), mask.end(), 0);
    for (const int64_t id : ids) {
      if (static_cast<size_t>(id / kTokensPerWord) < mask.size()) {
        allow(mask, id);
      }
    }
  };
}

std::string read_all(std::istream& stream) {
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

// Reads the value of --prompt-ids: token ids, or @FILE for a file of token ids, or - for stdin.
std::vector<int64_t> parse_prompt(std::string_view flag, const std::string& text) {
  if (text == "-") {
    return parse_ids(flag, read_all(std::cin));
  }
  if (text.starts_with('@')) {
    std::ifstream file(text.substr(1));
    if (!file) {
      fail(flag, ": cannot read the file ", text.substr(1));
    }
    return parse_ids(flag, read_all(file));
  }
  return parse_ids(flag, text);
}

struct Option {
  std::string_view flag;
  std::string_view value; // the name of the value in --help; empty: the option takes no value
  std::string_view help;
  void (*apply)(RunnerOptions&, std::string_view flag, const std::string& text);
};

// For a sampling parameter, the help text begins with the help text in the table of llm/sampling_parameters.py.
constexpr Option kOptions[] = {
    {"--prompt-ids", "IDS", "the prompt: 1,2,3, or @FILE, or - for stdin; give it several times for several prompts",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.prompts.push_back(parse_prompt(f, t)); }},
    {"--max-new-tokens", "N", "end the answer after N tokens (default: 128)",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.max_new_tokens = parse_integer(f, t, 1);
        }},
    {"--min-new-tokens", "N", "do not end the answer before N tokens (default: 0)",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.min_new_tokens = parse_integer(f, t, 0);
        }},
    {"--temperature", "X", "divide the logits by this; 0 is greedy decoding",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.temperature = parse_number(f, t, 0);
        }},
    {"--top-p", "X", "keep the most likely tokens up to this total probability; 1 keeps all",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.request.top_p = parse_number(f, t, 0, 1); }},
    {"--seed", "N", "the same seed gives the same tokens",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.seed = parse_integer(f, t, kMinInt);
        }},
    {"--top-k", "N", "keep the N most likely tokens; 0 keeps all",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.request.top_k = parse_integer(f, t, 0); }},
    {"--min-p", "X", "keep tokens with at least this fraction of the highest probability; 0 keeps all",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.request.min_p = parse_number(f, t, 0, 1); }},
    {"--repetition-penalty", "X", "values above 1 make tokens that occurred less likely; 1 changes nothing",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.repetition_penalty = parse_number(f, t, 0);
        }},
    {"--presence-penalty", "X", "subtract this from the logits of tokens that occurred; 0 changes nothing",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.presence_penalty = parse_number(f, t);
        }},
    {"--frequency-penalty", "X", "subtract this for each time that a token occurred; 0 changes nothing",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.frequency_penalty = parse_number(f, t);
        }},
    {"--logit-bias", "LIST", "add numbers to the logits of some tokens, such as 5:1.5,7:-100",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.request.logit_bias = parse_bias(f, t); }},
    {"--allow-ids", "IDS", "draw only these tokens",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          o.request.allowed_tokens = allow_only(parse_ids(f, t));
        }},
    {"--stop", "TEXT", "end the answer before this string; may be repeated",
        [](RunnerOptions& o, std::string_view f, const std::string& t) {
          if (t.empty()) {
            fail(f, ": got an empty string, expected at least one character");
          }
          o.request.stop.push_back(t);
        }},
    {"--stop-ids", "IDS", "end the answer at these tokens, in addition to the model's own",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.request.stop_ids = parse_ids(f, t); }},
    {"--ignore-eos", "", "do not end the answer at the model's own stop ids",
        [](RunnerOptions& o, std::string_view, const std::string&) { o.request.ignore_eos = true; }},
    {"--ids", "", "print token ids, one per line, instead of text",
        [](RunnerOptions& o, std::string_view, const std::string&) { o.ids = true; }},
    {"--json", "", "print one JSON object per line: each token, then the answer with metrics",
        [](RunnerOptions& o, std::string_view, const std::string&) { o.json = true; }},
    {"--device", "NAME", "cpu or gpu (default: $EXECUTORCH_MLX_DEVICE, or MLX's default)",
        [](RunnerOptions& o, std::string_view, const std::string& t) { o.device = t; }},
    {"--draft-model", "FILE", "a smaller program with the same tokenizer, which guesses tokens for speculation",
        [](RunnerOptions& o, std::string_view, const std::string& t) { o.draft_model = t; }},
    {"--memory-limit", "SIZE", "limit for weights, KV caches and results together, such as 2GiB (default: no limit)",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.memory_limit = parse_size(f, t); }},
    {"--repeat", "N", "generate N times, each from an empty context (default: 1)",
        [](RunnerOptions& o, std::string_view f, const std::string& t) { o.repeat = parse_integer(f, t, 1); }},
    {"--profile", "FILE", "time each instruction, for ExecuTorch's Inspector; this is slower",
        [](RunnerOptions& o, std::string_view, const std::string& t) { o.profile = t; }},
    {"--help", "", "print this help", [](RunnerOptions& o, std::string_view, const std::string&) { o.help = true; }},
};

const Option& find_option(std::string_view flag) {
  for (const Option& option : kOptions) {
    if (option.flag == flag || (flag == "-h" && option.flag == "--help")) {
      return option;
    }
  }
  fail(flag, ": unknown option");
}

} // namespace

RunnerOptions parse_command_line(int argc, char** argv) {
  RunnerOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (!argument.starts_with('-')) {
      if (!options.model.empty()) {
        fail("unexpected argument '", argument, "': the model is ", options.model);
      }
      options.model = argument;
      continue;
    }
    const size_t equals = argument.find('=');
    const bool has_equals = equals != std::string::npos;
    const std::string flag = argument.substr(0, equals);
    const Option& option = find_option(flag);
    std::string value = has_equals ? argument.substr(equals + 1) : "";
    if (option.value.empty() && has_equals) {
      fail(flag, ": this option takes no value");
    }
    if (!option.value.empty() && !has_equals) {
      if (i + 1 == argc) {
        fail(flag, ": missing value");
      }
      value = argv[++i];
    }
    option.apply(options, option.flag, value);
    if (options.help) {
      return options;
    }
  }
  if (options.model.empty()) {
    fail("missing argument MODEL.pte");
  }
  if (options.prompts.empty()) {
    fail("missing option --prompt-ids");
  }
  return options;
}

std::string usage() {
  std::string text = "usage: mlx_llm_runner MODEL.pte --prompt-ids IDS [options]\n\n";
  for (const Option& option : kOptions) {
    std::string left = str("  ", option.flag, option.value.empty() ? "" : " ", option.value);
    left.resize(std::max<size_t>(left.size() + 1, 26), ' ');
    text += str(left, option.help, "\n");
  }
  text +=
      "\nFor one prompt, text and token ids are printed to stdout as they are generated. For\n"
      "several prompts, they are printed at the end. Timings, the seed and the finish reason\n"
      "go to stderr. Ctrl-C ends the answer.\n\n"
      "finish reasons:";
  for (int32_t finish = EXECUTORCH_MLX_STOP; finish <= EXECUTORCH_MLX_FINISH_ERROR; ++finish) {
    text += str(" ", to_string(finish));
  }
  text +=
      "\nexit status: 0; 1 if the program failed; 2 if the command line or the request is\n"
      "invalid; 130 after Ctrl-C\n";
  return text;
}

} // namespace executorch_mlx::engine
