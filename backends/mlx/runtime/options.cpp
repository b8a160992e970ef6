#include "options.h"

#include <charconv>
#include <cstring>
#include <limits>
#include <string_view>

#include "device.h"
#include "error.h"

namespace executorch_mlx {

namespace {

namespace et = executorch::runtime;

using Text = std::array<char, et::kMaxOptionValueLength>;

std::string text(const char* key, const et::OptionValue& value) {
  const auto* given = std::get_if<Text>(&value);
  check_argument(given != nullptr, key, ": a text was expected");
  const std::string_view whole(given->data(), given->size());
  return std::string(whole.substr(0, whole.find('\0')));
}

bool flag(const char* key, const et::OptionValue& value) {
  if (const auto* given = std::get_if<bool>(&value)) {
    return *given;
  }
  const std::string word = std::holds_alternative<Text>(value) ? text(key, value) : "";
  check_argument(word == "true" || word == "false", key, ": a bool was expected, or \"true\" or \"false\"");
  return word == "true";
}

std::vector<int> windows(const char* key, const et::OptionValue& value) {
  if (const auto* given = std::get_if<int>(&value)) {
    check_argument(*given >= 0, key, ": ", *given, " came, 0 or more was expected");
    return {*given};
  }
  const std::string list = text(key, value);
  std::vector<int> result;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    int window = 0;
    const auto [stop, error] = std::from_chars(list.data() + begin, list.data() + end, window);
    check_argument(
        error == std::errc() && stop == list.data() + end && window >= 0 && end + 1 != list.size(),
        key, ": \"", list, "\" came, numbers of positions like \"512,512,0\" were expected");
    result.push_back(window);
    begin = end + 1;
  }
  return result;
}

et::OptionValue as_text(const std::string& text) {
  Text value{};
  text.copy(value.data(), value.size() - 1);
  return value;
}

struct Row {
  const char* key;
  void (*set)(Options&, const char* key, const et::OptionValue&);
  et::OptionValue (*get)(const Options&);
};

constexpr Row kRows[] = {
    {"device",
     [](Options& o, const char* key, const et::OptionValue& v) {
       find_device(text(key, v));
       o.device = text(key, v);
     },
     [](const Options& o) { return as_text(name(chosen_device(o.device))); }},
    {"metal_kernels",
     [](Options& o, const char* key, const et::OptionValue& v) {
       if (flag(key, v) && !EXECUTORCH_MLX_METAL_KERNELS) {
         fail(Error::NotSupported, key, ": this build is without EXECUTORCH_MLX_METAL_KERNELS");
       }
       o.metal_kernels = flag(key, v);
     },
     [](const Options& o) -> et::OptionValue { return o.metal_kernels; }},
    {"kv_windows",
     [](Options& o, const char* key, const et::OptionValue& v) { o.kv_windows = windows(key, v); },
     [](const Options& o) {
       std::string list;
       for (const int window : o.kv_windows) {
         list += str(list.empty() ? "" : ",", window);
       }
       return as_text(list);
     }},
};

const Row& find_row(const char* key) {
  for (const Row& row : kRows) {
    if (std::strcmp(row.key, key) == 0) {
      return row;
    }
  }
  fail(Error::InvalidArgument, "option \"", key, "\" is unknown, device, metal_kernels or kv_windows was expected");
}

} // namespace

void set(Options& options, const et::BackendOption& option) {
  find_row(option.key).set(options, option.key, option.value);
}

void get(const Options& options, et::BackendOption& option) {
  option.value = find_row(option.key).get(options);
}

void DefaultOptions::set(et::Span<const et::BackendOption> changes) {
  std::lock_guard lock(mutex_);
  Options changed = options_;
  for (const auto& option : changes) {
    executorch_mlx::set(changed, option);
  }
  options_ = changed;
}

} // namespace executorch_mlx
