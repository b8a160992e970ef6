#pragma once

#include <array>
#include <numeric>

#include <mlx/backend/cuda/cuda.h>

#include "ops/row.h"

namespace executorch_mlx {

template <size_t N>
struct ConvWindow {
  std::array<int, N> stride;
  std::array<int, N> padding;
  std::array<int, N> dilation;
  std::array<int, N> output_padding{};
};

inline ConvWindow<1> window(const fb::Conv1DParams& n) {
  return {{n.stride()}, {n.padding()}, {n.dilation()}};
}
inline ConvWindow<2> window(const fb::Conv2DParams& n) {
  return {{n.stride_h(), n.stride_w()}, {n.padding_h(), n.padding_w()}, {n.dilation_h(), n.dilation_w()}};
}
inline ConvWindow<3> window(const fb::Conv3DParams& n) {
  return {
      {n.stride_d(), n.stride_h(), n.stride_w()},
      {n.padding_d(), n.padding_h(), n.padding_w()},
      {n.dilation_d(), n.dilation_h(), n.dilation_w()}};
}
inline ConvWindow<1> window(const fb::ConvTranspose1DParams& n) {
  return {{n.stride()}, {n.padding()}, {n.dilation()}, {n.output_padding()}};
}
inline ConvWindow<2> window(const fb::ConvTranspose2DParams& n) {
  return {
      {n.stride_h(), n.stride_w()},
      {n.padding_h(), n.padding_w()},
      {n.dilation_h(), n.dilation_w()},
      {n.output_padding_h(), n.output_padding_w()}};
}
inline ConvWindow<3> window(const fb::ConvTranspose3DParams& n) {
  return {
      {n.stride_d(), n.stride_h(), n.stride_w()},
      {n.padding_d(), n.padding_h(), n.padding_w()},
      {n.dilation_d(), n.dilation_h(), n.dilation_w()},
      {n.output_padding_d(), n.output_padding_h(), n.output_padding_w()}};
}

// x [B, ..., C] with stride - 1 zeros between its elements along every axis but the first and last.
inline mx::array spread(const mx::array& x, const std::vector<int>& stride, mx::StreamOrDevice s) {
  mx::Shape shape = x.shape(), steps(x.ndim(), 1);
  for (size_t i = 0; i < stride.size(); ++i) {
    shape[i + 1] = (shape[i + 1] - 1) * stride[i] + 1;
    steps[i + 1] = stride[i];
  }
  return mx::slice_update(mx::zeros(shape, x.dtype(), s), x, mx::Shape(x.ndim(), 0), shape, steps, s);
}

// w [O, ..., C] with the axes between the first and last turned round.
inline mx::array turned(const mx::array& w, mx::StreamOrDevice s) {
  std::vector<int> axes(w.ndim() - 2);
  std::iota(axes.begin(), axes.end(), 1);
  return mx::flip(w, axes, s);
}

// MLX 0.32's CUDA backend gives wrong numbers for a transposed convolution with groups that is not the
// first of an evaluation, and for one that differs from an earlier one in its stride only.
inline bool transposes_by_hand(mx::Stream stream) {
  return stream.device == mx::Device::gpu && mx::cu::is_available();
}

// A convolution over N axes; `kTransposed` spreads the input instead.
// x is [B, ..., C], w is [O, ..., C / groups].
template <typename Node, size_t N, bool kTransposed>
void conv(const Node& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& w = c.in(n.w());
  const ConvWindow<N> at = window(n);
  const int groups = n.groups();
  check_argument(x.ndim() == N + 2 && w.ndim() == N + 2, "x and w have ", x.ndim(), " and ", w.ndim(), " axes, ", N + 2, " were expected");
  check_program(groups > 0, "groups ", groups, " is not positive");
  check_argument(
      x.shape(-1) == int64_t{w.shape(-1)} * groups && w.shape(0) % groups == 0,
      "x has ", x.shape(-1), " channels and w is of shape ", dims(w.shape()), ", which does not make ", groups, " groups");

  mx::Shape shape{x.shape(0)};
  std::vector<int> low, high, ones(N, 1);
  for (size_t i = 0; i < N; ++i) {
    constexpr int kMost = 1 << 20;
    check_program(
        at.stride[i] > 0 && at.stride[i] < kMost && at.dilation[i] > 0 && at.dilation[i] < kMost &&
            at.padding[i] >= 0 && at.padding[i] < kMost && at.output_padding[i] >= 0 && at.output_padding[i] < kMost,
        "axis ", i, " has stride ", at.stride[i], ", padding ", at.padding[i], ", dilation ", at.dilation[i],
        " and output padding ", at.output_padding[i]);
    const int64_t length = x.shape(static_cast<int>(i) + 1);
    const int64_t kernel = w.shape(static_cast<int>(i) + 1);
    check_argument(length > 0 && kernel > 0, "axis ", i, " of x or w is empty");
    const int64_t reach = at.dilation[i] * (kernel - 1);
    int64_t size = 0;
    if (kTransposed) {
      size = (length - 1) * at.stride[i] - 2 * at.padding[i] + reach + 1 + at.output_padding[i];
      low.push_back(c.size("padding", reach - at.padding[i]));
      high.push_back(c.size("padding", reach - at.padding[i] + at.output_padding[i]));
    } else {
      const int64_t room = length + 2 * at.padding[i] - reach - 1;
      size = room < 0 ? 0 : room / at.stride[i] + 1;
      low.push_back(at.padding[i]);
      high.push_back(at.padding[i]);
    }
    check_argument(size > 0, "axis ", i, " of the result would have ", size, " positions");
    shape.push_back(c.size("a size of the result", size));
  }
  shape.push_back(w.shape(0));
  Context::check_size(shape, x.dtype());

  const auto stride = std::vector<int>(at.stride.begin(), at.stride.end());
  const auto dilation = std::vector<int>(at.dilation.begin(), at.dilation.end());
  if (!kTransposed) {
    return c.set(n.out(), mx::conv_general(x, w, stride, low, high, dilation, ones, groups, /*flip=*/false, c.stream));
  }
  const bool by_hand = transposes_by_hand(c.stream);
  c.set(
      n.out(),
      mx::conv_general(
          by_hand ? spread(x, stride, c.stream) : x, by_hand ? turned(w, c.stream) : w, ones, low, high, dilation,
          by_hand ? ones : stride, groups, /*flip=*/!by_hand, c.stream));
}

constexpr Row kConvRows[] = {
    MLX_ROW(Conv1DNode, conv<fb::Conv1DParams, 1, false>),
    MLX_ROW(Conv2DNode, conv<fb::Conv2DParams, 2, false>),
    MLX_ROW(Conv3DNode, conv<fb::Conv3DParams, 3, false>),
    MLX_ROW(ConvTranspose1DNode, conv<fb::ConvTranspose1DParams, 1, true>),
    MLX_ROW(ConvTranspose2DNode, conv<fb::ConvTranspose2DParams, 2, true>),
    MLX_ROW(ConvTranspose3DNode, conv<fb::ConvTranspose3DParams, 3, true>),
};

} // namespace executorch_mlx
