// The C API of program.h. No exception leaves this file.
#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/program.h>
#pragma GCC visibility pop
#include <executorch/extension/tensor/tensor_ptr.h>
#include <executorch_mlx/delegate.h>

#include <chrono>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "c_api.h"
#include "check.h"
#include "fork_check.h"
#include "metadata.h"
#include "open_module.h"

using namespace executorch_mlx::engine;
using executorch::aten::ScalarType;
using executorch::aten::SizesType;
using executorch::aten::Tensor;
using executorch::extension::make_tensor_ptr;
using executorch::extension::Module;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

struct executorch_mlx_program {
  std::string path;
  std::unique_ptr<Module> module;
  std::optional<MetadataReader> reader;
  std::string methods;
  std::mutex calls; // held during a call
};

namespace {

std::string describe_array(ScalarType type, const std::vector<int64_t>& shape) {
  std::string text = dtype_name(type) + " [";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += str(i == 0 ? "" : ", ", shape[i]);
  }
  return text + "]";
}

// Returns a view of `array`. Throws EngineError if the method does not take it as input `index`.
TensorPtr read_input(const executorch_mlx_array& array, const executorch::runtime::MethodMeta& meta, size_t index,
    const std::string& method) {
  check_argument(array.size >= sizeof(array), "inputs: got size ", array.size, ", expected that of the struct");
  check_argument(0 <= array.rank && array.rank <= EXECUTORCH_MLX_MAX_RANK, "inputs: got rank ", array.rank,
      ", expected at most ", int{EXECUTORCH_MLX_MAX_RANK});
  const auto info = meta.input_tensor_meta(index);
  check_argument(info.ok(), method, ": input ", index, ": expected a number, got an array");
  const std::vector<int64_t> shape(array.shape, array.shape + array.rank);
  const std::vector<int64_t> most(info->sizes().begin(), info->sizes().end());
  const auto type = static_cast<ScalarType>(array.dtype);
  bool fits = type == info->scalar_type() && shape.size() == most.size();
  size_t count = 1;
  for (size_t axis = 0; fits && axis < shape.size(); ++axis) {
    fits = 0 <= shape[axis] && shape[axis] <= most[axis];
    count *= fits ? static_cast<size_t>(shape[axis]) : 0;
  }
  check_argument(fits, method, ": input ", index, ": got ", describe_array(type, shape), ", expected at most ",
      describe_array(info->scalar_type(), most));
  check_argument(count == 0 || array.data != nullptr, method, ": input ", index, ": got null");
  return make_tensor_ptr({shape.begin(), shape.end()}, const_cast<void*>(array.data), type);
}

void write_output(const EValue& value, executorch_mlx_array& array, const std::string& method, size_t index) {
  check(value.isTensor() && has_memory(value.toTensor()), EXECUTORCH_MLX_FAILED, method, ": output ", index,
      ": expected an array");
  const Tensor& tensor = value.toTensor();
  check(tensor.dim() <= EXECUTORCH_MLX_MAX_RANK, EXECUTORCH_MLX_FAILED, method, ": output ", index, ": got rank ",
      tensor.dim(), ", expected at most ", int{EXECUTORCH_MLX_MAX_RANK});
  for (ssize_t axis = 0; axis < tensor.dim(); ++axis) {
    check(tensor.dim_order()[axis] == axis, EXECUTORCH_MLX_FAILED, method, ": output ", index,
        ": expected a row-major array");
    array.shape[axis] = tensor.size(axis);
  }
  array.dtype = static_cast<int32_t>(tensor.scalar_type());
  array.rank = static_cast<int32_t>(tensor.dim());
  array.data = tensor.const_data_ptr();
}

void call(executorch_mlx_program& program, const std::string& method, const executorch_mlx_array* inputs,
    size_t input_count, executorch_mlx_array* outputs, size_t output_count, double* seconds) {
  check_not_forked();
  const std::lock_guard lock(program.calls);
  check_argument(program.reader->has_method(method), "method: got ", method, ", expected one of ",
      program.reader->describe_methods());
  const auto meta = program.module->method_meta(method);
  check_program(meta.ok(), program.path, ": ", method, ": ", describe(meta.error()));
  check_argument(
      input_count == meta->num_inputs(), method, ": got ", input_count, " inputs, expected ", meta->num_inputs());
  check_argument(output_count == meta->num_outputs(), method, ": got room for ", output_count, " outputs, expected ",
      meta->num_outputs());
  std::vector<TensorPtr> tensors;
  std::vector<EValue> arguments;
  for (size_t i = 0; i < input_count; ++i) {
    tensors.push_back(read_input(inputs[i], *meta, i, method));
    arguments.emplace_back(*tensors.back());
  }
  for (size_t i = 0; i < output_count; ++i) {
    check_argument(outputs[i].size >= sizeof(executorch_mlx_array), "outputs: got size ", outputs[i].size,
        ", expected that of the struct");
  }
  check_ok(program.module->load_method(method), program.path, ": cannot load the method ", method, ": ");
  const auto begin = std::chrono::steady_clock::now();
  const auto values = program.module->execute(method, arguments);
  check_ok(values.error(), method, ": ");
  for (size_t i = 0; i < output_count; ++i) {
    write_output((*values)[i], outputs[i], method, i);
  }
  if (seconds != nullptr) {
    *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }
}

} // namespace

extern "C" {

executorch_mlx_status executorch_mlx_program_load(
    const char* path, const char* device, executorch_mlx_program** program) {
  return guarded([&] {
    check_not_null(path, "path");
    check_not_null(program, "program");
    auto result = std::make_unique<executorch_mlx_program>();
    result->path = path;
    result->module = open_module(path, device == nullptr ? "" : device);
    result->reader.emplace(*result->module, path);
    for (const std::string& name : result->reader->method_names()) {
      result->methods += (result->methods.empty() ? "" : "\n") + name;
    }
    *program = result.release();
  });
}

void executorch_mlx_program_free(executorch_mlx_program* program) {
  if (program != nullptr && !executorch_mlx_is_forked()) {
    delete program;
  }
}

const char* executorch_mlx_program_methods(const executorch_mlx_program* program) {
  return program == nullptr ? "" : program->methods.c_str();
}

executorch_mlx_status executorch_mlx_program_get_int(
    const executorch_mlx_program* program, const char* name, int64_t* value) {
  return guarded([&] {
    check_not_null(program, "program");
    check_not_null(name, "name");
    check_not_null(value, "value");
    const auto found = program->reader->find_integer(name);
    check(found.has_value(), EXECUTORCH_MLX_NOT_FOUND, "name: the program has no integer ", name);
    *value = *found;
  });
}

executorch_mlx_status executorch_mlx_program_get_data(
    const executorch_mlx_program* program, const char* name, const void** data, size_t* size) {
  return guarded([&] {
    check_not_null(program, "program");
    check_not_null(name, "name");
    check_not_null(data, "data");
    check_not_null(size, "size");
    const auto found = program->reader->find_bytes(name);
    check(found.has_value(), EXECUTORCH_MLX_NOT_FOUND, "name: the program has no data ", name);
    *data = found->data();
    *size = found->size();
  });
}

executorch_mlx_status executorch_mlx_program_call(executorch_mlx_program* program, const char* method,
    const executorch_mlx_array* inputs, size_t input_count, executorch_mlx_array* outputs, size_t output_count,
    double* seconds) {
  return guarded([&] {
    check_not_null(program, "program");
    check_not_null(method, "method");
    check_argument(inputs != nullptr || input_count == 0, "inputs: got null");
    check_argument(outputs != nullptr || output_count == 0, "outputs: got null");
    call(*program, method, inputs, input_count, outputs, output_count, seconds);
  });
}

} // extern "C"
