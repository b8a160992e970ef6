// Trains on one batch with a program of `export_training`, and prints the losses.
//   train training.pte BATCH LENGTH STEPS
// It links executorch_mlx::mlx_delegate and ExecuTorch's Module: see docs/cpp-api.md.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch_mlx/delegate.h>

using executorch::aten::ScalarType;
using executorch::extension::from_blob;
using executorch::extension::Module;
using executorch::runtime::EValue;

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: train training.pte BATCH LENGTH STEPS\n");
    return 2;
  }
  const int batch = std::atoi(argv[2]), length = std::atoi(argv[3]), steps = std::atoi(argv[4]);
  const size_t count = static_cast<size_t>(batch) * static_cast<size_t>(length);
  std::vector<int64_t> tokens(count), targets(count);
  std::vector<float> mask(count, 1.0f);
  for (size_t i = 0; i < count; ++i) {
    tokens[i] = static_cast<int64_t>(i % 17);
    targets[i] = static_cast<int64_t>((i + 1) % 17);
  }
  executorch_mlx_register();
  Module module(argv[1]);
  for (int64_t step = 1; step <= steps; ++step) {
    float lr = 1e-3f;
    const auto loss = module.execute("train_step",
        {EValue(from_blob(tokens.data(), {batch, length}, ScalarType::Long)),
            EValue(from_blob(targets.data(), {batch, length}, ScalarType::Long)),
            EValue(from_blob(mask.data(), {batch, length})), EValue(from_blob(&lr, {})),
            EValue(from_blob(&step, {}, ScalarType::Long))});
    if (!loss.ok()) {
      std::fprintf(stderr, "train_step failed: error %d\n", static_cast<int>(loss.error()));
      return 1;
    }
    std::printf(
        "step %lld: loss %.4f\n", static_cast<long long>(step), loss->at(0).toTensor().const_data_ptr<float>()[0]);
  }
  return 0;
}
