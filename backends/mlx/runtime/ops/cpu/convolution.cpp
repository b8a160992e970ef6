// Convolutions: see cpu_kernels.h.
#include <limits>

#include "ops/cpu/cpu_kernels.h"
#include "kernels/cpu/convolution.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

std::optional<mx::array> convolution(const mx::array& x, const mx::array& w, const Window& window, int groups,
    const mx::Shape& shape, mx::Stream stream) {
  constexpr size_t kMaxAxes = std::size(kernel::Convolution{}.axes);
  const size_t axes = window.stride.size();
  if (!is_supported_operand(x, stream) || x.dtype() != mx::float32 || w.dtype() != mx::float32 || axes > kMaxAxes) {
    return std::nullopt;
  }
  kernel::Convolution c{
      .batch = x.shape(0), .groups = groups, .inputs = w.shape(-1), .outputs = w.shape(0) / groups, .axes = {}};
  for (size_t i = 0; i < kMaxAxes; ++i) {
    const size_t missing = kMaxAxes - axes;
    const size_t axis = i - missing;
    c.axes[i] = i < missing ? kernel::WindowAxis{1, 1, 1, 1, 0, 1}
                            : kernel::WindowAxis{x.shape()[axis + 1], shape[axis + 1], w.shape()[axis + 1],
                                  window.stride[axis], window.padding[axis], window.dilation[axis]};
  }
  const int64_t size = kernel::convolution_weights(c);
  if (size > std::numeric_limits<int>::max()) {
    return std::nullopt;
  }
  const auto pack = [c](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    return [c, w = inputs[0].data<float>(), packed = out.data<float>()] { kernel::pack_convolution(c, w, packed); };
  };
  const auto packed =
      kernel_result("ConvolutionWeights", {static_cast<int>(size)}, mx::float32, {contiguous(w, stream)}, stream, pack);
  const auto multiply = [c](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    return [c, x = inputs[0].data<float>(), packed = inputs[1].data<float>(), y = out.data<float>()] {
      kernel::convolution(c, x, packed, y);
    };
  };
  return kernel_result("ConvolutionKernel", shape, x.dtype(), {contiguous(x, stream), packed}, stream, multiply);
}

} // namespace executorch_mlx::cpu
