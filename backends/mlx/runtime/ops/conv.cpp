// Convolutions. See op.h.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <numeric>

#include "kernels/cpu/convolution.h"
#include "memory/kernel_result.h"
#include "ops/linalg.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

namespace {

// The spatial axes of a convolution.
struct Window {
  std::vector<int> stride;
  std::vector<int> padding; // before and after x
  std::vector<int> dilation;
};

// The convolution of x [batch, ..., channels] with w [outputs, ..., channels / groups], both float32, over up to three
// spatial axes. The result has the given shape.
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
  int64_t size = 0;
  if constexpr (kHasKernels) {
    size = kernel::convolution_weights(c);
  }
  if (size > std::numeric_limits<int>::max()) {
    return std::nullopt;
  }
  const auto pack = [c](const auto& inputs, auto& out) -> Task {
    return [c, w = inputs[0].template data<float>(), packed = out.template data<float>()] {
      kernel::pack_convolution(c, w, packed);
    };
  };
  const auto packed =
      kernel_result("ConvolutionWeights", {static_cast<int>(size)}, mx::float32, {contiguous(w, stream)}, stream, pack);
  const auto multiply = [c](const auto& inputs, auto& out) -> Task {
    return [c, x = inputs[0].template data<float>(), packed = inputs[1].template data<float>(),
               y = out.template data<float>()] { kernel::convolution(c, x, packed, y); };
  };
  return kernel_result("ConvolutionKernel", shape, x.dtype(), {contiguous(x, stream), packed}, stream, multiply);
}

} // namespace

} // namespace cpu

namespace {

// The parameters of a convolution for each of its N spatial axes.
template <size_t N>
struct ConvWindow {
  std::array<int, N> stride;
  std::array<int, N> padding;
  std::array<int, N> dilation;
  std::array<int, N> output_padding{};
};

ConvWindow<1> conv_window(const fb::Conv1DParams& n) { return {{n.stride()}, {n.padding()}, {n.dilation()}}; }
ConvWindow<2> conv_window(const fb::Conv2DParams& n) {
  return {{n.stride_h(), n.stride_w()}, {n.padding_h(), n.padding_w()}, {n.dilation_h(), n.dilation_w()}};
}
ConvWindow<3> conv_window(const fb::Conv3DParams& n) {
  return {{n.stride_d(), n.stride_h(), n.stride_w()}, {n.padding_d(), n.padding_h(), n.padding_w()},
      {n.dilation_d(), n.dilation_h(), n.dilation_w()}};
}
ConvWindow<1> conv_window(const fb::ConvTranspose1DParams& n) {
  return {{n.stride()}, {n.padding()}, {n.dilation()}, {n.output_padding()}};
}
ConvWindow<2> conv_window(const fb::ConvTranspose2DParams& n) {
  return {{n.stride_h(), n.stride_w()}, {n.padding_h(), n.padding_w()}, {n.dilation_h(), n.dilation_w()},
      {n.output_padding_h(), n.output_padding_w()}};
}
ConvWindow<3> conv_window(const fb::ConvTranspose3DParams& n) {
  return {{n.stride_d(), n.stride_h(), n.stride_w()}, {n.padding_d(), n.padding_h(), n.padding_w()},
      {n.dilation_d(), n.dilation_h(), n.dilation_w()},
      {n.output_padding_d(), n.output_padding_h(), n.output_padding_w()}};
}

// Checks the parameters of spatial axis i. The upper limit keeps the product of a parameter and a size within 64 bits.
template <size_t N>
void check_axis(const ConvWindow<N>& window, size_t i) {
  constexpr int kMax = 1 << 20;
  const int stride = window.stride[i], padding = window.padding[i];
  const int dilation = window.dilation[i], output_padding = window.output_padding[i];
  check_program(stride > 0 && stride < kMax && dilation > 0 && dilation < kMax && padding >= 0 && padding < kMax &&
          output_padding >= 0 && output_padding < kMax,
      "axis ", i, ": got stride ", stride, ", padding ", padding, ", dilation ", dilation, " and output padding ",
      output_padding,
      ", expected stride and dilation of at least 1, padding and output padding of at least 0, all below ", kMax);
}

// Inserts stride - 1 zeros between adjacent elements on the spatial axes of x [B, ..., C].
mx::array insert_zeros(const mx::array& x, const std::vector<int>& stride, mx::StreamOrDevice s) {
  mx::Shape shape = x.shape(), steps(x.ndim(), 1);
  for (size_t i = 0; i < stride.size(); ++i) {
    shape[i + 1] = (shape[i + 1] - 1) * stride[i] + 1;
    steps[i + 1] = stride[i];
  }
  return mx::slice_update(mx::zeros(shape, x.dtype(), s), x, mx::Shape(x.ndim(), 0), shape, steps, s);
}

// Reverses the spatial axes of w [O, ..., C].
mx::array flip_spatial(const mx::array& w, mx::StreamOrDevice s) {
  std::vector<int> axes(w.ndim() - 2);
  std::iota(axes.begin(), axes.end(), 1);
  return mx::flip(w, axes, s);
}

// Whether a transposed convolution must be computed as a plain convolution. The CUDA backend of MLX 0.32 returns
// wrong results for a transposed convolution with several groups unless it is the first in an evaluation, and for
// a transposed convolution that differs from an earlier one only in its stride.
bool avoids_transposed(mx::Stream stream) { return stream.device == mx::Device::gpu && mx::cu::is_available(); }

// Splits the kernel w [groups, O, ..., C] of a transposed convolution on one axis. The result has `stride`
// times as many channels O: one kernel for each phase, in the order in which a plain convolution reads it. An element
// of a phase is `stride` elements after the one before.
mx::array split_phases(mx::array w, int axis, int stride, mx::Stream s) {
  const int size = (w.shape(axis) + stride - 1) / stride;
  const int missing = size * stride - w.shape(axis);
  w = mx::pad(w, {axis}, {0}, {missing}, mx::array(0, w.dtype()), "constant", s);
  w = mx::flip(mx::unflatten(w, axis, {size, stride}, s), {axis}, s);
  return mx::flatten(mx::moveaxis(w, axis + 1, 1, s), 1, 2, s);
}

// Moves the phases of an axis from the channels of y [B, ..., groups, O] to the axis: the reverse of split_phases().
mx::array interleave_phases(mx::array y, int axis, int stride, mx::Stream s) {
  y = mx::unflatten(y, -1, {stride, y.shape(-1) / stride}, s);
  return mx::flatten(mx::moveaxis(y, -2, axis + 1, s), axis, axis + 1, s);
}

// A transposed convolution in float32, with the result of the given shape, as a plain convolution of the elements of x.
// MLX's CPU backend computes it in a slow loop over the elements of x and the zeros between them.
template <size_t N>
std::optional<mx::array> conv_by_phases(
    const mx::array& x, mx::array w, const ConvWindow<N>& window, int groups, const mx::Shape& shape, mx::Stream s) {
  mx::Shape start(N + 2, 0), stop = shape, plain{x.shape(0)};
  std::vector<int> padding;
  w = mx::unflatten(w, 0, {groups, w.shape(0) / groups}, s);
  for (int axis = 1; axis <= static_cast<int>(N); ++axis) {
    const int stride = window.stride[axis - 1], cropped = window.padding[axis - 1];
    w = split_phases(w, axis + 1, stride, s);
    const int reach = w.shape(axis + 1) - 1;
    const int first = std::min(cropped / stride, reach); // the first element of each phase that is computed
    const int last = (cropped + shape[axis] - 1) / stride;
    padding.push_back(reach - first);
    plain.push_back(last + 1 - first);
    start[axis] = cropped - first * stride;
    stop[axis] += start[axis];
  }
  w = mx::flatten(w, 0, 1, s);
  plain.push_back(w.shape(0));
  check_size(plain, x.dtype());
  const std::vector<int> ones(N, 1);
  auto y = cpu::convolution(x, w, {ones, padding, ones}, groups, plain, s);
  if (!y) {
    return std::nullopt;
  }
  y = mx::unflatten(*y, -1, {groups, plain.back() / groups}, s);
  for (int axis = N; axis >= 1; --axis) {
    y = interleave_phases(*y, axis, window.stride[axis - 1], s);
  }
  return mx::slice(mx::flatten(*y, -2, -1, s), start, stop, s);
}

// A convolution on a CPU, with the result of the given shape. nullopt if there is no kernel.
template <size_t N, bool kTransposed>
std::optional<mx::array> conv_on_cpu(const mx::array& x, const mx::array& w, const ConvWindow<N>& window, int groups,
    const mx::Shape& shape, Context& c) {
  if (c.stream.device != mx::Device::cpu || !is_float(x.dtype()) || x.dtype() != w.dtype()) {
    return std::nullopt;
  }
  std::optional<mx::array> y;
  if constexpr (kTransposed) {
    const auto& stride = window.stride;
    const bool is_dense = std::all_of(window.dilation.begin(), window.dilation.end(), [](int d) { return d == 1; });
    const bool fits = std::equal(stride.begin(), stride.end(), w.shape().begin() + 1, std::less_equal<int>());
    if (is_dense && fits) {
      y = conv_by_phases<N>(to_float32(x, c), to_float32(w, c), window, groups, shape, c.stream);
    }
  } else {
    const cpu::Window axes{{window.stride.begin(), window.stride.end()}, {window.padding.begin(), window.padding.end()},
        {window.dilation.begin(), window.dilation.end()}};
    y = cpu::convolution(to_float32(x, c), to_float32(w, c), axes, groups, shape, c.stream);
  }
  return y ? std::optional(mx::astype(*y, x.dtype(), c.stream)) : std::nullopt;
}

// The shapes of a convolution, and the zeros that MLX adds to x on each spatial axis.
struct ConvShapes {
  mx::Shape result;
  mx::Shape padded; // x with zeros between its elements and around them
  mx::Shape start; // of the result in that of MLX, which does not crop a transposed convolution
  std::vector<int> low, high; // zeros before x and after it
};

template <size_t N, bool kTransposed>
ConvShapes conv_shapes(const mx::array& x, const mx::array& w, const ConvWindow<N>& window, Context& c) {
  ConvShapes shapes{{x.shape(0)}, {x.shape(0)}, mx::Shape(N + 2, 0), {}, {}};
  for (size_t i = 0; i < N; ++i) {
    check_axis(window, i);
    const int64_t length = x.shape(static_cast<int>(i) + 1);
    const int64_t kernel = w.shape(static_cast<int>(i) + 1);
    check_argument(length > 0 && kernel > 0, "axis ", i, ": x or w is empty");
    const int64_t reach = window.dilation[i] * (kernel - 1); // from the first to the last element under the kernel
    int64_t size = 0;
    if (kTransposed) {
      size = (length - 1) * window.stride[i] - 2 * window.padding[i] + reach + 1 + window.output_padding[i];
      const int64_t before = reach - window.padding[i], after = before + window.output_padding[i];
      shapes.start[i + 1] = std::max(0, c.checked_int("padding", -before));
      shapes.low.push_back(std::max(0, c.checked_int("padding", before)));
      shapes.high.push_back(std::max(0, c.checked_int("padding", after)));
    } else {
      const int64_t room = length + 2 * window.padding[i] - reach - 1; // the last position where the kernel fits
      size = room < 0 ? 0 : room / window.stride[i] + 1;
      shapes.low.push_back(window.padding[i]);
      shapes.high.push_back(window.padding[i]);
    }
    check_argument(size > 0, "axis ", i, ": got a result of size ", size, ", expected 1 or more");
    shapes.result.push_back(c.checked_int("result size", size));
    // A transposed convolution is a plain one over x with stride - 1 zeros between adjacent elements.
    const int64_t spread = kTransposed ? (length - 1) * window.stride[i] + 1 : length;
    shapes.padded.push_back(c.checked_int("padded size", spread + shapes.low.back() + shapes.high.back()));
  }
  shapes.result.push_back(w.shape(0));
  shapes.padded.push_back(x.shape(-1));
  return shapes;
}

// A convolution over N spatial axes of x [B, ..., C] with the weights w [O, ..., C / groups].
template <typename Node, size_t N, bool kTransposed>
void conv(const Node& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& w = c.in(n.w());
  const ConvWindow<N> window = conv_window(n);
  const int groups = n.groups();
  check_argument(x.ndim() == N + 2 && w.ndim() == N + 2, "got x ", describe(x), " and w ", describe(w), ", expected ",
      N + 2, " axes each");
  check_program(groups > 0, "groups: got ", groups, ", expected 1 or more");
  check_argument(x.shape(-1) == int64_t{w.shape(-1)} * groups && w.shape(0) % groups == 0, "got x with ", x.shape(-1),
      " channels and w with shape ", dims(w.shape()),
      ", expected channels = w.shape[-1] * groups and w.shape[0] divisible by groups, with groups = ", groups);

  const auto shapes = conv_shapes<N, kTransposed>(x, w, window, c);
  const auto& shape = shapes.result;
  check_size(shapes.padded, x.dtype());
  if (x.size() == 0 || w.size() == 0) { // MLX divides by the number of channels
    return c.set(n.out(), mx::zeros(shape, x.dtype(), c.stream));
  }
  c.expect_product(shape, x.dtype(), static_cast<int64_t>(w.size()) / w.shape(0));

  if (const auto y = conv_on_cpu<N, kTransposed>(x, w, window, groups, shape, c)) {
    return c.set(n.out(), *y);
  }
  const auto stride = std::vector<int>(window.stride.begin(), window.stride.end());
  const auto dilation = std::vector<int>(window.dilation.begin(), window.dilation.end());
  const std::vector<int> ones(N, 1);
  if (!kTransposed) {
    const auto y =
        mx::conv_general(x, w, stride, shapes.low, shapes.high, dilation, ones, groups, /*flip=*/false, c.stream);
    return c.set(n.out(), y);
  }
  const bool as_plain = avoids_transposed(c.stream);
  const auto y =
      mx::conv_general(as_plain ? insert_zeros(x, stride, c.stream) : x, as_plain ? flip_spatial(w, c.stream) : w, ones,
          shapes.low, shapes.high, dilation, as_plain ? ones : stride, groups, /*flip=*/!as_plain, c.stream);
  mx::Shape stop = shape;
  std::transform(stop.begin(), stop.end(), shapes.start.begin(), stop.begin(), std::plus<int>());
  c.set(n.out(), y.shape() == shape ? y : mx::slice(y, shapes.start, stop, c.stream));
}

} // namespace

MLX_OP(Conv1DNode, conv<fb::Conv1DParams, 1, false>)
MLX_OP(Conv2DNode, conv<fb::Conv2DParams, 2, false>)
MLX_OP(Conv3DNode, conv<fb::Conv3DParams, 3, false>)
MLX_OP(ConvTranspose1DNode, conv<fb::ConvTranspose1DParams, 1, true>)
MLX_OP(ConvTranspose2DNode, conv<fb::ConvTranspose2DParams, 2, true>)
MLX_OP(ConvTranspose3DNode, conv<fb::ConvTranspose3DParams, 3, true>)

} // namespace executorch_mlx
