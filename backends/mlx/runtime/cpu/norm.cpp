#include "accelerate.h"
#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

std::optional<mx::array> rms_norm(
    const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::Stream stream) {
  if (!is_supported_operand(x, stream) || (weight && weight->dtype() != mx::float32)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{contiguous(x, stream)};
  if (weight) {
    inputs.push_back(contiguous(*weight, stream));
  }
  const auto make_task = [eps](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const float* x = inputs[0].data<float>();
    const float* weight = inputs.size() > 1 ? inputs[1].data<float>() : nullptr;
    const int64_t width = out.shape(-1);
    const int64_t rows = static_cast<int64_t>(out.size()) / width;
    return [=, y = out.data<float>()] { executorch_mlx_rms_norm(x, weight, y, rows, width, eps); };
  };
  return lazy_array("RmsNorm", x.shape(), std::move(inputs), stream, make_task);
}

} // namespace executorch_mlx::cpu
