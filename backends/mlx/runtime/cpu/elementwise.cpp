#include "accelerate.h"
#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

std::optional<mx::array> silu(const mx::array& x, mx::Stream stream) {
  if (!is_supported_operand(x, stream)) {
    return std::nullopt;
  }
  const auto make_task = [](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto count = static_cast<int64_t>(out.size());
    return [x = inputs[0].data<void>(), type = *float_type(out.dtype()), y = out.data<void>(), count] {
      executorch_mlx_silu(x, type, y, count);
    };
  };
  return lazy_array("Silu", x.shape(), x.dtype(), {contiguous(x, stream)}, stream, make_task);
}

} // namespace executorch_mlx::cpu
