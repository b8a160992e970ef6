// Depthwise convolution: see accelerate.h.
#include "accelerate.h"
#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

std::optional<mx::array> depthwise_convolution(
    const mx::array& x, const mx::array& w, const Window& window, const mx::Shape& shape, mx::Stream stream) {
  constexpr size_t kMaxAxes = std::size(ExecutorchMlxDepthwise{}.axes);
  const size_t axes = window.stride.size();
  if (!is_supported_operand(x, stream) || x.dtype() != mx::float32 || w.dtype() != mx::float32 || axes > kMaxAxes) {
    return std::nullopt;
  }
  ExecutorchMlxDepthwise d{.batch = x.shape(0), .channels = x.shape(-1), .axes = {}};
  for (size_t i = 0; i < kMaxAxes; ++i) {
    const size_t missing = kMaxAxes - axes;
    const size_t axis = i - missing;
    d.axes[i] = i < missing ? ExecutorchMlxWindowAxis{1, 1, 1, 1, 0, 1}
                            : ExecutorchMlxWindowAxis{
                                  x.shape()[axis + 1],  shape[axis + 1],      w.shape()[axis + 1],
                                  window.stride[axis], window.padding[axis], window.dilation[axis]};
  }
  const auto make_task = [d](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    return [d, x = inputs[0].data<float>(), w = inputs[1].data<float>(), y = out.data<float>()] {
      executorch_mlx_depthwise(&d, x, w, y);
    };
  };
  return kernel_result(
      "DepthwiseConvolution", shape, x.dtype(), {contiguous(x, stream), contiguous(w, stream)}, stream, make_task);
}

} // namespace executorch_mlx::cpu
