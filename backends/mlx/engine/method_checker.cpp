#include "method_checker.h"

#include <executorch/runtime/backend/interface.h>

#include "check.h"

namespace executorch_mlx::engine {

using executorch::aten::ScalarType;
using executorch::extension::Module;
using executorch::runtime::MethodMeta;
using executorch::runtime::Tag;

namespace {

constexpr double kMebibyte = 1 << 20;
constexpr double kMaxInputMebibytes = 1024;

MethodMeta read_meta(Module& module, const std::string& prefix, const std::string& method) {
  const auto meta = module.method_meta(method);
  check_program(meta.ok(), prefix, describe(meta.error()));
  return *meta;
}

std::string type_name(ScalarType type) { return type == ScalarType::Undefined ? "no tensor" : dtype_name(type); }

} // namespace

MethodChecker::MethodChecker(Module& module, const std::string& path, const std::string& method)
    : prefix_(str(path, ": ", method, ": ")), meta_(read_meta(module, prefix_, method)) {}

void MethodChecker::check_inputs(const std::vector<MethodInput>& inputs) const {
  check_program(meta_.num_inputs() == inputs.size(), prefix_, "got ", meta_.num_inputs(), " inputs, expected ",
      inputs.size(), " according to the metadata");
  double bytes = 0; // of all inputs: may exceed 64 bits
  for (size_t i = 0; i < inputs.size(); ++i) {
    const MethodInput& input = inputs[i];
    const std::string prefix = str(prefix_, "input ", i, " (", input.name, "): ");
    const auto tag = meta_.input_tag(i);
    check_program(tag.ok() && *tag == Tag::Tensor, prefix, "expected a tensor");
    const auto info = meta_.input_tensor_meta(i);
    const auto sizes = info->sizes();
    check_program(info->scalar_type() == input.type && sizes.size() == input.sizes.size(), prefix, "got ",
        dtype_name(info->scalar_type()), " of rank ", sizes.size(), ", expected ", dtype_name(input.type), " of rank ",
        input.sizes.size());
    double size = static_cast<double>(executorch::runtime::elementSize(input.type));
    for (size_t axis = 0; axis < sizes.size(); ++axis) {
      // For a dynamic axis, the program gives the largest size that it accepts.
      const bool is_dynamic = static_cast<int>(axis) == input.dynamic_axis;
      check_program(is_dynamic ? sizes[axis] >= input.sizes[axis] : sizes[axis] == input.sizes[axis], prefix,
          "got size ", sizes[axis], " on axis ", axis, ", expected ", is_dynamic ? "at least " : "", input.sizes[axis],
          " according to the metadata");
      size *= input.sizes[axis];
    }
    bytes += size;
  }
  check_program(bytes <= kMaxInputMebibytes * kMebibyte, prefix_, "the inputs take ", bytes / kMebibyte,
      " MiB of memory, expected at most ", kMaxInputMebibytes);
}

void MethodChecker::check_backends() const {
  for (size_t i = 0; i < meta_.num_backends(); ++i) {
    const char* backend = meta_.get_backend_name(i).get();
    check_program(executorch::runtime::get_backend_class(backend) != nullptr, prefix_, "the backend ", backend,
        " is not registered in this process");
  }
}

int64_t MethodChecker::max_size(size_t input, size_t axis) const {
  const auto info = meta_.input_tensor_meta(input);
  return info.ok() && axis < info->sizes().size() ? info->sizes()[axis] : 0;
}

bool MethodChecker::is_one_mlx_call() const {
  return meta_.num_instructions() == 1 && meta_.num_backends() == 1 && meta_.uses_backend("MLXBackend");
}

// Returns the dtype of the first output, or Undefined if there is no output or the first one is not a tensor.
ScalarType MethodChecker::output_type() const {
  if (meta_.num_outputs() == 0) {
    return ScalarType::Undefined;
  }
  const auto tag = meta_.output_tag(0);
  return tag.ok() && *tag == Tag::Tensor ? meta_.output_tensor_meta(0)->scalar_type() : ScalarType::Undefined;
}

void MethodChecker::check_returns_tokens() const {
  const ScalarType type = output_type();
  check_program(type == ScalarType::Long, prefix_, "output: got ", type_name(type), ", expected tokens (Long)");
}

void MethodChecker::check_returns_logits() const {
  const ScalarType type = output_type();
  check_program(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16, prefix_,
      "output: got ", type_name(type), ", expected logits (Float, Half or BFloat16)");
}

} // namespace executorch_mlx::engine
