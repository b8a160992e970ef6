// The constant methods of a program: what it says about itself.
#pragma once

#include <executorch/extension/module/module.h>
#include <executorch_mlx/llm_runner.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace executorch_mlx {

class Constants {
 public:
  // `path` is for messages. `module` has to outlive what array() gives.
  Constants(executorch::extension::Module& module, std::string path);

  bool has(const std::string& name) const;
  const std::vector<std::string>& names() const {
    return names_;
  }

  // Throw LlmError where the value is of another kind; the second three where there is
  // no such method.
  bool flag(const std::string& name, bool otherwise);
  int64_t integer(const std::string& name, int64_t otherwise);
  int64_t integer(const std::string& name);
  std::vector<int64_t> integers(const std::string& name);
  template <typename T>
  std::span<const T> array(const std::string& name, executorch::aten::ScalarType type);

 private:
  std::vector<executorch::runtime::EValue> values(const std::string& name);

  executorch::extension::Module& module_;
  std::string path_;
  std::vector<std::string> names_;  // of all methods, sorted
};

LlmMetadata read_metadata(Constants& constants, const std::string& path);

// The bytes of every token in a row and where each begins, in the program's own memory;
// empty if it has none.
struct TokenTable {
  std::span<const uint8_t> bytes;
  std::span<const int64_t> offsets;
};
TokenTable read_token_table(Constants& constants, const LlmMetadata& metadata, const std::string& path);

} // namespace executorch_mlx
