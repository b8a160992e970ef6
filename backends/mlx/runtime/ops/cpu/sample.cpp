// The sampler: see cpu_kernels.h.
#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/sample.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

std::optional<mx::array> sample(const SampleInputs& operands, mx::Stream stream) {
  const auto type = float_type(operands.logits.dtype());
  if (!computes_at_once(stream) || !type) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs;
  for (const auto* x : {&operands.logits, &operands.temperature, &operands.top_p, &operands.seed}) {
    inputs.push_back(contiguous(*x, stream));
  }
  for (const auto* x : {&operands.top_k, &operands.min_p}) {
    if (*x) {
      inputs.push_back(contiguous(**x, stream));
    }
  }
  const auto make_task = [type = *type, has_top_k = operands.top_k.has_value(), has_min_p = operands.min_p.has_value()](
                             const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto floats = [](const mx::array& x) { return kernel::Floats{x.data<float>(), x.size() > 1}; };
    const auto integers = [](const mx::array& x) { return kernel::Integers{x.data<int64_t>(), x.size() > 1}; };
    const kernel::Sample sample{.logits = inputs[0].data<char>(),
        .type = type,
        .rows = inputs[0].shape(0),
        .vocabulary = inputs[0].shape(1),
        .temperature = floats(inputs[1]),
        .top_p = floats(inputs[2]),
        .seed = integers(inputs[3]),
        .top_k = has_top_k ? integers(inputs[4]) : kernel::Integers{},
        .min_p = has_min_p ? floats(inputs.back()) : kernel::Floats{},
        .tokens = out.data<int64_t>()};
    return [sample] { kernel::sample(sample); };
  };
  return kernel_result("Sample", {operands.logits.shape(0)}, mx::int64, std::move(inputs), stream, make_task);
}

} // namespace executorch_mlx::cpu
