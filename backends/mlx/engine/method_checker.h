// Compares the signature of a method with the metadata of its program.
#pragma once

#include <executorch/extension/module/module.h>

#include <functional>
#include <string>
#include <vector>

namespace executorch_mlx::engine {

struct RowTask;

// An input tensor that a method should have.
struct MethodInput {
  const char* name;
  executorch::aten::ScalarType type;
  std::vector<executorch::aten::SizesType> sizes; // of the dynamic axis: a size that the method must accept
  int dynamic_axis = -1; // -1: none
  // Of a Method: writes what the input has for a task, the one with this index in a call, to the memory of the tensor.
  std::function<void(void* memory, size_t index, const RowTask& task)> write = {};
};

// All checks throw EngineError.
class MethodChecker {
 public:
  // `path` is the name of the file in error messages. `module` must outlive the checker.
  MethodChecker(executorch::extension::Module& module, const std::string& path, const std::string& method);

  // Checks that the method has exactly the inputs `inputs`, in this order, and that they fit into 1 GiB of memory.
  void check_inputs(const std::vector<MethodInput>& inputs) const;

  // Checks that all backends that the method needs are registered in this process.
  void check_backends() const;

  // Returns the largest size of an axis of an input, or 0 if there is no such axis.
  int64_t max_size(size_t input, size_t axis) const;

  // Whether the whole method is one call of the backend MLXBackend. All its mutable buffers are then MLX arrays.
  bool is_one_mlx_call() const;

  size_t num_outputs() const { return meta_.num_outputs(); }

  void check_returns_tokens() const;
  void check_returns_logits() const;

 private:
  executorch::aten::ScalarType output_type() const;

  std::string prefix_; // of error messages
  executorch::runtime::MethodMeta meta_;
};

} // namespace executorch_mlx::engine
