#include "options.h"

#include <charconv>
#include <cstring>
#include <string_view>

#include "device.h"
#include "error.h"

namespace executorch_mlx {

namespace {

namespace et = executorch::runtime;

using StringValue = std::array<char, et::kMaxOptionValueLength>;

std::string parse_string(const char* key, const et::OptionValue& value) {
  const auto* chars = std::get_if<StringValue>(&value);
  check_argument(chars != nullptr, key, ": expected a string");
  const std::string_view whole(chars->data(), chars->size());
  return std::string(whole.substr(0, whole.find('\0')));
}

bool parse_bool(const char* key, const et::OptionValue& value) {
  if (const auto* flag = std::get_if<bool>(&value)) {
    return *flag;
  }
  const auto* number = std::get_if<int>(&value);
  const std::string string = number ? std::to_string(*number) : parse_string(key, value);
  check_argument(
      string == "true" || string == "false", key, ": got \"", string, "\", expected a bool, \"true\" or \"false\"");
  return string == "true";
}

std::vector<int> parse_windows(const char* key, const et::OptionValue& value) {
  if (const auto* window = std::get_if<int>(&value)) {
    check_argument(*window >= 0, key, ": got ", *window, ", expected 0 or more");
    return {*window};
  }
  const std::string list = parse_string(key, value);
  std::vector<int> result;
  for (size_t begin = 0; begin < list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    int window = 0;
    const auto [stop, error] = std::from_chars(list.data() + begin, list.data() + end, window);
    check_argument(error == std::errc() && stop == list.data() + end && window >= 0 && end + 1 != list.size(), key,
        ": got \"", list, "\", expected numbers of positions, such as \"512,512,0\"");
    result.push_back(window);
    begin = end + 1;
  }
  return result;
}

int64_t parse_limit(const char* key, const et::OptionValue& value, int64_t highest) {
  const auto* small = std::get_if<int>(&value);
  const std::string text = small ? std::to_string(*small) : parse_string(key, value);
  int64_t limit = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), limit);
  check_argument(error == std::errc() && stop == text.data() + text.size() && limit > 0 && limit <= highest, key,
      ": got \"", text, "\", expected a number in [1, ", highest, "]");
  return limit;
}

// Returns an option value with the string. A string that is too long is cut off.
et::OptionValue to_value(const std::string& string) {
  StringValue value{};
  string.copy(value.data(), value.size() - 1);
  return value;
}

struct OptionEntry {
  const char* key;
  void (*set)(Options&, const char* key, const et::OptionValue&);
  et::OptionValue (*get)(const Options&);
};

constexpr OptionEntry kOptions[] = {
    {"device",
        [](Options& o, const char* key, const et::OptionValue& v) {
          find_device(parse_string(key, v));
          o.device = parse_string(key, v);
        },
        [](const Options& o) { return to_value(name(chosen_device(o.device))); }},
    {"metal_kernels",
        [](Options& o, const char* key, const et::OptionValue& v) {
          if (parse_bool(key, v) && !EXECUTORCH_MLX_METAL_KERNELS) {
            fail(Error::NotSupported, key, ": needs a build with EXECUTORCH_MLX_METAL_KERNELS");
          }
          o.metal_kernels = parse_bool(key, v);
        },
        [](const Options& o) -> et::OptionValue { return o.metal_kernels; }},
    {"kv_windows", [](Options& o, const char* key, const et::OptionValue& v) { o.kv_windows = parse_windows(key, v); },
        [](const Options& o) {
          std::string list;
          for (const int window : o.kv_windows) {
            list += str(list.empty() ? "" : ",", window);
          }
          return to_value(list);
        }},
    {"max_instructions",
        [](Options& o, const char* key, const et::OptionValue& v) {
          o.limits.instructions = parse_limit(key, v, Limits().instructions);
        },
        [](const Options& o) { return to_value(std::to_string(o.limits.instructions)); }},
    {"max_operations",
        [](Options& o, const char* key, const et::OptionValue& v) {
          o.limits.operations = parse_limit(key, v, Limits().operations);
        },
        [](const Options& o) { return to_value(std::to_string(o.limits.operations)); }},
    {"priority",
        [](Options& o, const char* key, const et::OptionValue& v) {
          const std::string priority = parse_string(key, v);
          check_argument(priority == "normal" || priority == "low", key, ": got \"", priority,
              "\", expected \"normal\" or \"low\"");
          o.has_low_priority = priority == "low";
        },
        [](const Options& o) { return to_value(o.has_low_priority ? "low" : "normal"); }},
};

const OptionEntry& find_option(const char* key) {
  for (const OptionEntry& option : kOptions) {
    if (std::strcmp(option.key, key) == 0) {
      return option;
    }
  }
  std::string keys;
  for (const OptionEntry& option : kOptions) {
    keys += str(keys.empty() ? "" : ", ", option.key);
  }
  fail(Error::InvalidArgument, "option: got \"", key, "\", expected one of ", keys);
}

} // namespace

void set(Options& options, const et::BackendOption& option) {
  find_option(option.key).set(options, option.key, option.value);
}

void get(const Options& options, et::BackendOption& option) { option.value = find_option(option.key).get(options); }

void DefaultOptions::set(et::Span<const et::BackendOption> changes) {
  std::lock_guard lock(mutex_);
  Options changed = options_;
  for (const auto& option : changes) {
    executorch_mlx::set(changed, option);
  }
  options_ = changed;
}

} // namespace executorch_mlx
