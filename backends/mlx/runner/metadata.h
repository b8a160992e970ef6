// Reads the metadata methods of a program: methods without inputs that return constants.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace executorch_mlx {

// boolean(), integer(), integers() and array() run the metadata method `name` and return its value. They throw LlmError
// if the value has another type. A function without the parameter `default_value` also throws if the method is missing.
class MetadataReader {
 public:
  // `path` is the name of the file in error messages. `module` must outlive the spans that array() returns.
  MetadataReader(executorch::extension::Module& module, std::string path);

  // The names of all methods, sorted.
  const std::vector<std::string>& method_names() const {
    return method_names_;
  }

  bool has(const std::string& name) const;
  bool boolean(const std::string& name, bool default_value);
  int64_t integer(const std::string& name);
  int64_t integer(const std::string& name, int64_t default_value);
  std::vector<int64_t> integers(const std::string& name);
  template <typename T>
  std::span<const T> array(const std::string& name, executorch::aten::ScalarType type);

 private:
  std::vector<executorch::runtime::EValue> values(const std::string& name);

  executorch::extension::Module& module_;
  std::string path_;
  std::vector<std::string> method_names_;
};

// Reads and validates the metadata. `path` is for error messages.
LlmMetadata read_metadata(MetadataReader& reader, const std::string& path);

// The bytes of all tokens, in the memory of the program. The bytes of token i begin at bytes[offsets[i]] and end before
// bytes[offsets[i + 1]]. Both spans are empty if the program contains no token bytes.
struct TokenTable {
  std::span<const uint8_t> bytes;
  std::span<const int64_t> offsets; // [vocab_size + 1]
};
TokenTable read_token_table(MetadataReader& reader, int64_t vocab_size, const std::string& path);

} // namespace executorch_mlx
