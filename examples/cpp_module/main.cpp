// run_module MODEL.pte: runs the method forward on inputs of ones, and prints the shape and the first numbers of each
// output.
#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch_mlx/delegate.h>

#include <cstdio>
#include <vector>

using executorch::aten::ScalarType;
using executorch::extension::Module;
using executorch::extension::ones;
using executorch::extension::TensorPtr;
using executorch::runtime::EValue;

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: run_module MODEL.pte\n");
    return 2;
  }
  // Before the first load: ExecuTorch keeps the first backend of a name.
  if (executorch_mlx_register() != 0) {
    return 1; // the log has the reason
  }
  Module module(argv[1], Module::LoadMode::Mmap); // weights are used in the mapped file
  const auto meta = module.method_meta("forward");
  if (!meta.ok()) {
    return 1;
  }
  std::vector<TensorPtr> tensors; // which the inputs refer to
  std::vector<EValue> inputs;
  for (size_t i = 0; i < meta->num_inputs(); ++i) {
    const auto input = meta->input_tensor_meta(i);
    if (!input.ok()) {
      std::fprintf(stderr, "input %zu is no tensor\n", i);
      return 1;
    }
    // A dynamic dimension has its largest size here. A call may pass a smaller one.
    tensors.push_back(ones({input->sizes().begin(), input->sizes().end()}, input->scalar_type()));
    inputs.emplace_back(tensors.back());
  }
  const auto outputs = module.forward(inputs);
  if (!outputs.ok()) {
    return 1;
  }
  for (const EValue& output : *outputs) {
    const auto& tensor = output.toTensor();
    std::printf("[");
    for (const auto size : tensor.sizes()) {
      std::printf(" %d", size);
    }
    std::printf(" ]");
    for (ssize_t i = 0; i < tensor.numel() && i < 5 && tensor.scalar_type() == ScalarType::Float; ++i) {
      std::printf(" %g", tensor.const_data_ptr<float>()[i]);
    }
    std::printf("\n");
  }
  return 0;
}
