// Normalization and softmax. See op.h.
#include "gpu/fused.h"
#include "kernels/cpu/norm.h"
#include "kernels/cpu/softmax.h"
#include "memory/kernel_result.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

namespace {

// Like mx::fast::layer_norm with `subtracts_mean`, else like mx::fast::rms_norm, computed in float32. x [..., width],
// and weight and bias [width], which have one dtype, are float32, float16 or bfloat16. The result has the dtype of x.
std::optional<mx::array> norm(const mx::array& x, bool subtracts_mean, const std::optional<mx::array>& weight,
    const std::optional<mx::array>& bias, float eps, mx::Stream stream) {
  std::vector<mx::array> inputs{x};
  for (const auto& parameter : {weight, bias}) {
    if (parameter) {
      inputs.push_back(contiguous(*parameter, stream));
    }
  }
  const bool has_one_dtype = inputs.size() < 3 || inputs[1].dtype() == inputs[2].dtype();
  if (!is_supported_operand(x, stream) || !float_type(inputs.back().dtype()) || !has_one_dtype) {
    return std::nullopt;
  }
  inputs[0] = contiguous(x, stream);
  const auto make_task = [=, has_weight = weight.has_value(), has_bias = bias.has_value()](
                             const auto& inputs, auto& out) -> Task {
    const void* weights = has_weight ? inputs[1].template data<void>() : nullptr;
    const void* biases = has_bias ? inputs.back().template data<void>() : nullptr;
    const auto type = *float_type(out.dtype());
    const auto parameter_type = *float_type(inputs.back().dtype());
    const int64_t width = out.shape(-1);
    const int64_t rows = static_cast<int64_t>(out.size()) / width;
    return [=, from = inputs[0].template data<void>(), to = out.template data<void>()] {
      kernel::norm(from, type, subtracts_mean, weights, biases, parameter_type, to, rows, width, eps);
    };
  };
  return kernel_result("Norm", x.shape(), x.dtype(), std::move(inputs), stream, make_task);
}

// Like mx::softmax over the last axis of x, which is float32.
std::optional<mx::array> softmax(const mx::array& x, mx::Stream stream) {
  if (!is_supported_operand(x, stream) || x.dtype() != mx::float32) {
    return std::nullopt;
  }
  const auto make_task = [](const auto& inputs, auto& out) -> Task {
    const int64_t width = out.shape(-1);
    const int64_t rows = static_cast<int64_t>(out.size()) / width;
    return [=, from = inputs[0].template data<float>(), to = out.template data<float>()] {
      kernel::softmax(from, to, rows, width);
    };
  };
  return kernel_result("Softmax", x.shape(), x.dtype(), {contiguous(x, stream)}, stream, make_task);
}

} // namespace

} // namespace cpu

namespace {

// Checks x and its weight or bias, which `argument` names.
void check_norm(const mx::array& x, const std::optional<mx::array>& weight, const char* argument) {
  check_argument(x.ndim() >= 1, "x: expected at least 1 axis");
  check_argument(!weight || (weight->ndim() == 1 && weight->shape(0) == x.shape(-1)), argument, ": got ",
      describe(weight.value_or(x)), ", expected shape [", x.shape(-1), "]");
}

void rms_norm(const fb::RMSNormParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto weight = c.optional(n.weight());
  check_norm(x, weight, "weight");
  if (const auto y = cpu::norm(x, /*subtracts_mean=*/false, weight, std::nullopt, n.eps(), c.stream)) {
    return c.set(n.out(), *y);
  }
  if (const auto y = weight ? gpu::rms_norm(x, *weight, n.eps(), c.stream) : std::nullopt) {
    return c.set(n.out(), *y);
  }
  c.set(n.out(), x.size() == 0 ? x : mx::fast::rms_norm(x, weight, n.eps(), c.stream));
}

void layer_norm(const fb::LayerNormParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto weight = c.optional(n.weight());
  const auto bias = c.optional(n.bias());
  check_norm(x, weight, "weight");
  check_norm(x, bias, "bias");
  if (const auto y = cpu::norm(x, /*subtracts_mean=*/true, weight, bias, n.eps(), c.stream)) {
    return c.set(n.out(), *y);
  }
  c.set(n.out(), x.size() == 0 ? x : mx::fast::layer_norm(x, weight, bias, n.eps(), c.stream));
}

void softmax(const fb::SoftmaxParams& n, Context& c) {
  const auto& x = c.in(n.x());
  if (x.ndim() == 0) {
    checked_axis(n.axis(), 1);
    return c.set(n.out(), mx::ones_like(x, c.stream));
  }
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const bool is_last = axis + 1 == static_cast<int>(x.ndim());
  if (const auto y = is_last ? cpu::softmax(x, c.stream) : std::nullopt) {
    return c.set(n.out(), *y);
  }
  c.set(n.out(), x.size() == 0 ? x : mx::softmax(x, std::vector<int>{axis}, n.precise(), c.stream));
}

} // namespace

MLX_OP(LayerNormNode, layer_norm)
MLX_OP(RMSNormNode, rms_norm)
MLX_OP(SoftmaxNode, softmax)

} // namespace executorch_mlx
