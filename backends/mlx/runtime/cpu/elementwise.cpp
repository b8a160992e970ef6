#include "accelerate.h"
#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

std::optional<mx::array> silu(const mx::array& x, mx::Stream stream) {
  if (!is_supported_operand(x, stream)) {
    return std::nullopt;
  }
  const auto make_task = [](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    return [x = inputs[0].data<float>(), y = out.data<float>(), count = static_cast<int64_t>(out.size())] {
      executorch_mlx_silu(x, y, count);
    };
  };
  return lazy_array("Silu", x.shape(), {contiguous(x, stream)}, stream, make_task);
}

} // namespace executorch_mlx::cpu
