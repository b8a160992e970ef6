#include "arguments.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>
#include <string_view>

#include "text.h"

namespace executorch_mlx {

namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kMin = std::numeric_limits<int64_t>::min();

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw UsageError(str(parts...));
}

int64_t integer(std::string_view flag, const std::string& text, int64_t low, int64_t high) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || value < low || value > high) {
    if (low == kMin) {
      refuse(flag, ": '", text, "' is not a 64-bit integer");
    }
    refuse(flag, ": '", text, "' is not an integer of at least ", low);
  }
  return value;
}

constexpr float kUnbounded = std::numeric_limits<float>::infinity();

float number(std::string_view flag, const std::string& text, float low, float high) {
  char* end = nullptr;
  const float value = std::strtof(text.c_str(), &end);
  const bool whole = !text.empty() && *end == '\0' && std::isfinite(value);
  if (!whole || value < low || value > high) {
    if (std::isinf(low)) {
      refuse(flag, ": '", text, "' is not a number");
    }
    if (std::isinf(high)) {
      refuse(flag, ": '", text, "' is not a number of at least ", low);
    }
    refuse(flag, ": '", text, "' is not a number from ", low, " to ", high);
  }
  return value;
}

// Commas, white space or both between the ids.
std::vector<int64_t> id_list(std::string_view flag, const std::string& text) {
  constexpr std::string_view kSeparators = ", \t\r\n";
  std::vector<int64_t> ids;
  size_t begin = 0;
  while ((begin = text.find_first_not_of(kSeparators, begin)) != std::string::npos) {
    const size_t end = std::min(text.find_first_of(kSeparators, begin), text.size());
    ids.push_back(integer(flag, text.substr(begin, end - begin), 0, kMax));
    begin = end;
  }
  if (ids.empty()) {
    refuse(flag, ": no ids, expected some like 1,2,3");
  }
  return ids;
}

// ID:NUMBER, with commas between them.
std::vector<std::pair<int64_t, float>> bias_list(std::string_view flag, const std::string& text) {
  std::vector<std::pair<int64_t, float>> result;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string pair = text.substr(begin, end - begin);
    const size_t colon = pair.find(':');
    if (colon == std::string::npos) {
      refuse(flag, ": '", pair, "' is no ID:NUMBER");
    }
    result.emplace_back(
        integer(flag, pair.substr(0, colon), 0, kMax),
        number(flag, pair.substr(colon + 1), -kUnbounded, kUnbounded));
    begin = end + 1;
  }
  return result;
}

// Ids beyond the vocabulary allow nothing more.
AllowedTokens allow_only(std::vector<int64_t> ids) {
  return [ids = std::move(ids)](std::span<const int64_t>, std::span<int32_t> words) {
    std::fill(words.begin(), words.end(), 0);
    for (const int64_t id : ids) {
      if (static_cast<size_t>(id / 32) < words.size()) {
        words[id / 32] |= static_cast<int32_t>(1u << (id % 32));
      }
    }
  };
}

std::string all_of(std::istream& stream) {
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

std::vector<int64_t> prompt_ids(std::string_view flag, const std::string& text) {
  if (text == "-") {
    return id_list(flag, all_of(std::cin));
  }
  if (text.starts_with('@')) {
    std::ifstream file(text.substr(1));
    if (!file) {
      refuse(flag, ": ", text.substr(1), " cannot be read");
    }
    return id_list(flag, all_of(file));
  }
  return id_list(flag, text);
}

struct Option {
  std::string_view flag;
  std::string_view value; // its name in the usage; empty: takes none
  std::string_view help;
  void (*apply)(Arguments&, std::string_view flag, const std::string& text);
};

constexpr Option kOptions[] = {
    {"--prompt-ids", "IDS", "the prompt: 1,2,3 or @FILE or - for stdin; several make a batch",
     [](Arguments& a, std::string_view f, const std::string& t) { a.prompts.push_back(prompt_ids(f, t)); }},
    {"--max-new-tokens", "N", "end after N tokens (128)",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.max_new_tokens = integer(f, t, 1, kMax);
     }},
    {"--temperature", "T", "0 is greedy (0)",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.temperature = number(f, t, 0, kUnbounded);
     }},
    {"--top-k", "K", "keep the K most likely tokens; 0 is off",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.top_k = integer(f, t, 0, kMax);
     }},
    {"--top-p", "P", "keep the most likely tokens of mass P; 1 is off (1)",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.top_p = number(f, t, 0, 1);
     }},
    {"--min-p", "P", "keep tokens with P times the best probability; 0 is off",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.min_p = number(f, t, 0, 1);
     }},
    {"--seed", "S", "64-bit seed of the first token (a random one, told on stderr)",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.seed = integer(f, t, kMin, kMax);
     }},
    {"--repetition-penalty", "R", "divides likely tokens that came before; 1 is off (1)",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.repetition_penalty = number(f, t, 0, kUnbounded);
     }},
    {"--presence-penalty", "P", "is taken from tokens that came before; 0 is off (0)",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.presence_penalty = number(f, t, -kUnbounded, kUnbounded);
     }},
    {"--frequency-penalty", "F", "is taken from them for every time; 0 is off (0)",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.frequency_penalty = number(f, t, -kUnbounded, kUnbounded);
     }},
    {"--logit-bias", "LIST", "5:1.5,7:-100 is added to the logits of 5 and 7",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.logit_bias = bias_list(f, t);
     }},
    {"--allow-ids", "IDS", "draw none but these",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.sampling.allowed_tokens = allow_only(id_list(f, t));
     }},
    {"--stop", "TEXT", "end before this text; may come several times",
     [](Arguments& a, std::string_view f, const std::string& t) {
       if (t.empty()) {
         refuse(f, ": an empty text, expected at least one character");
       }
       a.config.stop.push_back(t);
     }},
    {"--stop-ids", "IDS", "end at these ids too, besides the model's own",
     [](Arguments& a, std::string_view f, const std::string& t) {
       a.config.stop_ids = id_list(f, t);
     }},
    {"--ignore-eos", "", "do not end at the model's own end ids",
     [](Arguments& a, std::string_view, const std::string&) { a.config.ignore_eos = true; }},
    {"--ids", "", "print ids, one a line, instead of text",
     [](Arguments& a, std::string_view, const std::string&) { a.ids = true; }},
    {"--json", "", "print an object a line: each token, then the answer with its metrics",
     [](Arguments& a, std::string_view, const std::string&) { a.json = true; }},
    {"--device", "NAME", "cpu or gpu (EXECUTORCH_MLX_DEVICE, else MLX's default)",
     [](Arguments& a, std::string_view, const std::string& t) { a.device = t; }},
    {"--repeat", "N", "run N times from an empty context, each with the same seed (1)",
     [](Arguments& a, std::string_view f, const std::string& t) { a.repeat = integer(f, t, 1, kMax); }},
    {"--profile", "FILE", "time every instruction, for ExecuTorch's Inspector; slower",
     [](Arguments& a, std::string_view, const std::string& t) { a.profile = t; }},
    {"--help", "", "print this",
     [](Arguments& a, std::string_view, const std::string&) { a.help = true; }},
};

const Option& find_option(std::string_view flag) {
  for (const Option& option : kOptions) {
    if (option.flag == flag || (flag == "-h" && option.flag == "--help")) {
      return option;
    }
  }
  refuse(flag, ": no such option");
}

} // namespace

Arguments parse_arguments(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (!word.starts_with('-')) {
      if (!arguments.model.empty()) {
        refuse("'", word, "': one model only, and it is ", arguments.model);
      }
      arguments.model = word;
      continue;
    }
    const size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    const Option& option = find_option(flag);
    const bool inlined = equals != std::string::npos;
    std::string value = inlined ? word.substr(equals + 1) : "";
    if (option.value.empty() && inlined) {
      refuse(flag, ": takes no value");
    }
    if (!option.value.empty() && !inlined) {
      if (i + 1 == argc) {
        refuse(flag, ": a value is missing");
      }
      value = argv[++i];
    }
    option.apply(arguments, option.flag, value);
    if (arguments.help) {
      return arguments;
    }
  }
  if (arguments.model.empty()) {
    refuse("no model: expected MODEL.pte");
  }
  if (arguments.prompts.empty()) {
    refuse("--prompt-ids: missing");
  }
  return arguments;
}

std::string usage() {
  std::string text = "usage: mlx_llm_runner MODEL.pte --prompt-ids IDS [options]\n\n";
  for (const Option& option : kOptions) {
    std::string left = str("  ", option.flag, option.value.empty() ? "" : " ", option.value);
    left.resize(std::max<size_t>(left.size() + 1, 26), ' ');
    text += str(left, option.help, "\n");
  }
  text +=
      "\nText or ids go to stdout as they come, those of a batch at the end, timings to\n"
      "stderr. Ctrl-C ends the answer.\n"
      "Exit status: 0, 1 if the program failed, 2 if it was asked for what it cannot do,\n"
      "130 after Ctrl-C.\n";
  return text;
}

} // namespace executorch_mlx
