// Gradients, and the loss, of training steps. GPUs run these nodes, CPUs the instructions that the nodes replace: see
// runs_as_replacement() in program.cpp. See op.h.
#include <functional>

#include "dtype.h"
#include "ops/index.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace {

using Function = std::function<std::vector<mx::array>(const std::vector<mx::array>&)>;

// The gradients of the operands of a function, from that of its result.
std::vector<mx::array> gradients(
    const Function& function, std::vector<mx::array> operands, const mx::array& grad, mx::Stream stream) {
  for (auto& x : operands) {
    x = mx::copy(x, stream); // MLX copies an operand on the stream that computes it, without one on the default stream
  }
  return mx::vjp(function, operands, {grad}).second;
}

void check_float(const char* name, const mx::array& x) {
  check_argument(is_float(x.dtype()), name, ": got ", describe(x), ", expected floating point");
}

void check_shape(const char* name, const mx::array& x, const mx::Shape& shape) {
  check_float(name, x);
  check_argument(x.shape() == shape, name, ": got ", describe(x), ", expected shape ", dims(shape));
}

void sdpa_gradients(const fb::SdpaGradientsParams& n, Context& c) {
  const std::vector<mx::array> operands{c.in(n.q()), c.in(n.k()), c.in(n.v())};
  const auto &q = operands[0], &k = operands[1], &v = operands[2];
  const auto& grad = c.in(n.grad());
  check_argument(q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4, "got q ", describe(q), ", k ", describe(k), " and v ",
      describe(v), ", expected 4 axes each");
  const int batch = q.shape(0), heads = q.shape(1), queries = q.shape(2), keys = k.shape(2);
  const int kv_heads = k.shape(1), v_width = v.shape(3);
  check_float("q", q);
  check_shape("k", k, {batch, kv_heads, keys, q.shape(3)});
  check_shape("v", v, {batch, kv_heads, keys, v_width});
  check_shape("grad", grad, {batch, heads, queries, v_width});
  check_argument(kv_heads == 0 || heads % kv_heads == 0, "q: got ", heads, " heads, expected a multiple of the ",
      kv_heads, " of k");
  auto mask = c.optional(n.mask());
  check_program(!(mask && n.causal()), "mask: expected none if causal is true");
  if (mask) {
    check_float("mask", *mask);
    mask = mx::astype(*mask, q.dtype(), c.stream);
  }
  const fb::Tid* const outs[] = {n.out_q(), n.out_k(), n.out_v()};
  if (q.size() == 0 || k.size() == 0 || v.size() == 0) {
    for (size_t i = 0; i < operands.size(); ++i) {
      c.set(outs[i], mx::zeros_like(operands[i], c.stream));
    }
    return;
  }
  for (int i = 0; i < 4; ++i) { // four more products of the same sizes than the attention itself
    c.count_operations(q.size(), keys);
  }
  c.expect_product({batch, heads, queries, v_width}, q.dtype(), keys);
  const auto attend = [&](const std::vector<mx::array>& x) -> std::vector<mx::array> {
    return {mx::fast::scaled_dot_product_attention(
        x[0], x[1], x[2], n.scale(), n.causal() ? "causal" : "", mask, std::nullopt, /*force_fused=*/false, c.stream)};
  };
  std::vector<mx::array> same_dtype;
  for (const auto& x : operands) {
    same_dtype.push_back(mx::astype(x, q.dtype(), c.stream));
  }
  const auto results = gradients(attend, std::move(same_dtype), grad, c.stream);
  for (size_t i = 0; i < operands.size(); ++i) {
    c.set(outs[i], mx::astype(results[i], operands[i].dtype(), c.stream));
  }
}

void rms_norm_gradient(const fb::RMSNormGradientParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& grad = c.in(n.grad());
  check_float("x", x);
  check_argument(x.ndim() >= 1, "x: expected at least 1 axis");
  check_shape("grad", grad, x.shape());
  if (x.size() == 0) {
    return c.set(n.out(), x);
  }
  const auto norm = [&](const std::vector<mx::array>& x) -> std::vector<mx::array> {
    return {mx::fast::rms_norm(x[0], std::nullopt, n.eps(), c.stream)};
  };
  c.set(n.out(), gradients(norm, {x}, grad, c.stream)[0]);
}

// The kernel of one elementwise function, which MLX compiles at the first call on a GPU.
void silu_gradient(const fb::SiluGradientParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& grad = c.in(n.grad());
  check_float("x", x);
  check_shape("grad", grad, x.shape());
  const auto compute = [s = c.stream](const std::vector<mx::array>& x) -> std::vector<mx::array> {
    const auto grad = mx::astype(x[0], mx::float32, s), wide = mx::astype(x[1], mx::float32, s);
    const auto share = mx::sigmoid(wide, s);
    const auto one = mx::array(1.0f);
    const auto slope = mx::add(one, mx::multiply(wide, mx::subtract(one, share, s), s), s);
    return {mx::astype(mx::multiply(grad, mx::multiply(share, slope, s), s), x[1].dtype(), s)};
  };
  const bool is_gpu = c.stream.device == mx::Device::gpu;
  c.set(n.out(), (is_gpu ? mx::compile(compute) : Function(compute))({grad, x})[0]);
}

// The targets of logits [..., V], as int32 indices within bounds.
mx::array checked_targets(const mx::array& logits, const mx::array& targets, Context& c) {
  check_float("logits", logits);
  check_argument(logits.ndim() >= 1 && targets.shape() == mx::Shape(logits.shape().begin(), logits.shape().end() - 1),
      "targets: got ", describe(targets), ", expected the shape of logits ", describe(logits),
      " without the last axis");
  return mx::astype(bounded_indices(targets, logits.shape(-1), c, /*from_end=*/false), mx::int32, c.stream);
}

void cross_entropy(const fb::CrossEntropyParams& n, Context& c) {
  const auto& logits = c.in(n.logits());
  const auto targets = checked_targets(logits, c.in(n.targets()), c);
  c.set(n.out(),
      targets.size() == 0 ? mx::zeros(targets.shape(), mx::float32, c.stream)
                          : mx::fast::cross_entropy(logits, targets, c.stream));
}

void cross_entropy_gradient(const fb::CrossEntropyGradientParams& n, Context& c) {
  const auto& logits = c.in(n.logits());
  const auto targets = checked_targets(logits, c.in(n.targets()), c);
  const auto& grad = c.in(n.grad());
  check_shape("grad", grad, targets.shape());
  if (targets.size() == 0) {
    return c.set(n.out(), logits);
  }
  const auto loss = [&](const std::vector<mx::array>& x) -> std::vector<mx::array> {
    return {mx::fast::cross_entropy(x[0], targets, c.stream)};
  };
  c.set(n.out(), gradients(loss, {logits}, grad, c.stream)[0]);
}

} // namespace

MLX_OP(CrossEntropyGradientNode, cross_entropy_gradient)
MLX_OP(CrossEntropyNode, cross_entropy)
MLX_OP(RMSNormGradientNode, rms_norm_gradient)
MLX_OP(SdpaGradientsNode, sdpa_gradients)
MLX_OP(SiluGradientNode, silu_gradient)

} // namespace executorch_mlx
