// Normalization and softmax. See op_row.h.
#pragma once

#include "ops/cpu/cpu_kernels.h"
#include "gpu/fused.h"
#include "ops/op_row.h"

namespace executorch_mlx {

// Checks x and its weight or bias, which `argument` names.
inline void check_norm(const mx::array& x, const std::optional<mx::array>& weight, const char* argument) {
  check_argument(x.ndim() >= 1, "x: expected at least 1 axis");
  check_argument(!weight || (weight->ndim() == 1 && weight->shape(0) == x.shape(-1)), argument, ": got ",
      describe(weight.value_or(x)), ", expected shape [", x.shape(-1), "]");
}

inline void rms_norm(const fb::RMSNormParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto weight = c.optional(n.weight());
  check_norm(x, weight, "weight");
  if (const auto y = cpu::rms_norm(x, weight, n.eps(), c.stream)) {
    return c.set(n.out(), *y);
  }
  if (const auto y = weight ? gpu::rms_norm(x, *weight, n.eps(), c.stream) : std::nullopt) {
    return c.set(n.out(), *y);
  }
  c.set(n.out(), x.size() == 0 ? x : mx::fast::rms_norm(x, weight, n.eps(), c.stream));
}

inline void layer_norm(const fb::LayerNormParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto weight = c.optional(n.weight());
  const auto bias = c.optional(n.bias());
  check_norm(x, weight, "weight");
  check_norm(x, bias, "bias");
  c.set(n.out(), x.size() == 0 ? x : mx::fast::layer_norm(x, weight, bias, n.eps(), c.stream));
}

inline void softmax(const fb::SoftmaxParams& n, Context& c) {
  const auto& x = c.in(n.x());
  if (x.ndim() == 0) {
    checked_axis(n.axis(), 1);
    return c.set(n.out(), mx::ones_like(x, c.stream));
  }
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  c.set(n.out(), x.size() == 0 ? x : mx::softmax(x, std::vector<int>{axis}, n.precise(), c.stream));
}

constexpr OpRow kNormRows[] = {
    MLX_ROW(LayerNormNode, layer_norm),
    MLX_ROW(RMSNormNode, rms_norm),
    MLX_ROW(SoftmaxNode, softmax),
};

} // namespace executorch_mlx
