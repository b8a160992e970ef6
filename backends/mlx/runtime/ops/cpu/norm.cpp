// RMSNorm: see cpu_kernels.h.
#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/norm.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

std::optional<mx::array> rms_norm(
    const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::Stream stream) {
  if (!is_supported_operand(x, stream) || (weight && !float_type(weight->dtype()))) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{contiguous(x, stream)};
  if (weight) {
    inputs.push_back(contiguous(*weight, stream));
  }
  const auto make_task = [eps](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto& x = inputs[0];
    const auto& weight = inputs.back(); // or x, if there is no weight
    const void* weights = inputs.size() > 1 ? weight.data<void>() : nullptr;
    const auto type = *float_type(x.dtype());
    const auto weight_type = *float_type(weight.dtype());
    const int64_t width = out.shape(-1);
    const int64_t rows = static_cast<int64_t>(out.size()) / width;
    return [=, from = x.data<void>(), to = out.data<void>()] {
      kernel::rms_norm(from, type, weights, weight_type, to, rows, width, eps);
    };
  };
  return kernel_result("RmsNorm", x.shape(), x.dtype(), std::move(inputs), stream, make_task);
}

} // namespace executorch_mlx::cpu
