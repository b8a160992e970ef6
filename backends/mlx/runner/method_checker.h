// Compares the signature of a method with the metadata of its program.
#pragma once

#include <executorch/extension/module/module.h>

#include <string>
#include <vector>

namespace executorch_mlx {

// An expected input tensor, and the memory that it views.
struct MethodInput {
  const char* name;
  executorch::aten::ScalarType type;
  std::vector<executorch::aten::SizesType> sizes;
  void* data;
};

// All checks throw LlmError.
class MethodChecker {
 public:
  // `path` is the name of the file in error messages. `module` must outlive the checker.
  MethodChecker(executorch::extension::Module& module, const std::string& path, const std::string& method);

  // `inputs` are all inputs of the method, in order. inputs[0] are the tokens, whose axis 1 is dynamic.
  void check_inputs(const std::vector<MethodInput>& inputs) const;

  // All backends that the method needs are registered in this process.
  void check_backends() const;

  void check_returns_tokens() const;
  void check_returns_logits() const;

 private:
  executorch::aten::ScalarType output_type() const;

  std::string prefix_; // of error messages
  executorch::runtime::MethodMeta meta_;
};

} // namespace executorch_mlx
