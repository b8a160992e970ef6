#include "shim.h"

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/core/exec_aten/util/scalar_type_util.h>
#include <executorch_mlx/delegate.h>

#include <string>
#include <vector>

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

struct shim_module {
  Module module;
  std::vector<EValue> outputs;
  std::string names;
};

shim_module* shim_open(const char* path) {
  return executorch_mlx_register() == 0 ? new shim_module{Module(path, Module::LoadMode::Mmap), {}, {}} : nullptr;
}

void shim_close(shim_module* module) { delete module; }

const char* shim_method_names(shim_module* module) {
  module->names.clear();
  if (const auto names = module->module.method_names(); names.ok()) {
    for (const auto& name : *names) {
      module->names += name + "\n";
    }
  }
  return module->names.c_str();
}

int shim_execute(shim_module* module, const char* method, const shim_value* inputs, size_t count) {
  std::vector<TensorPtr> tensors;
  std::vector<EValue> values;
  for (size_t i = 0; i < count; ++i) {
    const shim_value& input = inputs[i];
    tensors.push_back(from_blob(
        const_cast<void*>(input.data), {input.sizes, input.sizes + input.rank}, static_cast<ScalarType>(input.dtype)));
    values.emplace_back(tensors.back());
  }
  auto result = module->module.execute(method, values);
  if (!result.ok()) {
    return -1;
  }
  module->outputs = std::move(*result);
  return static_cast<int>(module->outputs.size());
}

shim_value shim_output(const shim_module* module, size_t index) {
  const EValue& value = module->outputs[index];
  if (!value.isTensor()) {
    return {-1, value.isBool() ? value.toBool() : value.toInt(), 0, nullptr, nullptr};
  }
  const auto& tensor = value.toTensor();
  return {static_cast<int8_t>(tensor.scalar_type()), 0, static_cast<int32_t>(tensor.dim()), tensor.sizes().data(),
      tensor.const_data_ptr()};
}

size_t shim_bytes(shim_value value) {
  size_t bytes = executorch::runtime::elementSize(static_cast<ScalarType>(value.dtype));
  for (int32_t i = 0; i < value.rank; ++i) {
    bytes *= static_cast<size_t>(value.sizes[i]);
  }
  return bytes;
}
