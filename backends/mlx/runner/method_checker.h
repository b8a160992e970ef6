// Compares the signature of a method with the metadata of its program.
#pragma once

#include <executorch/extension/module/module.h>

#include <string>
#include <vector>

namespace executorch_mlx {

// An input tensor that a method should have, and the memory of the tensor that LlmProgram passes for it.
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

  // Checks that the method has exactly the inputs `inputs`, in this order. inputs[0] are the tokens; their axis 1 is
  // dynamic.
  void check_inputs(const std::vector<MethodInput>& inputs) const;

  // Checks that all backends that the method needs are registered in this process.
  void check_backends() const;

  void check_returns_tokens() const;
  void check_returns_logits() const;

 private:
  executorch::aten::ScalarType output_type() const;

  std::string prefix_; // of error messages
  executorch::runtime::MethodMeta meta_;
};

} // namespace executorch_mlx
