// The part of the C API of executorch_mlx/delegate.h that reads which inputs a program expects.
#pragma GCC visibility push(default) // the library exports only these functions
#include <executorch_mlx/delegate.h>
#pragma GCC visibility pop

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/runtime/executor/program.h>

#include <algorithm>

int executorch_mlx_input_order(
    const void* program, size_t size, const char* method, size_t input, uint8_t* order, size_t capacity) {
  executorch::extension::BufferDataLoader loader(program, size);
  const auto loaded = executorch::runtime::Program::load(&loader);
  if (!loaded.ok()) {
    return -1;
  }
  const auto meta = loaded->method_meta(method);
  if (!meta.ok() || input >= meta->num_inputs()) {
    return -1;
  }
  const auto tag = meta->input_tag(input);
  if (!tag.ok() || *tag != executorch::runtime::Tag::Tensor) {
    return -1;
  }
  const auto tensor = meta->input_tensor_meta(input);
  if (!tensor.ok() || tensor->dim_order().size() > capacity) {
    return -1;
  }
  std::copy(tensor->dim_order().begin(), tensor->dim_order().end(), order);
  return static_cast<int>(tensor->dim_order().size());
}
