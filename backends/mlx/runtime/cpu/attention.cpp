#include <algorithm>

#include "accelerate.h"
#include "attention_inputs.h"
#include "kernels/blas.h"
#include "primitive.h"

namespace executorch_mlx::cpu {

namespace {

bool broadcasts_to(const mx::Shape& from, const mx::Shape& to) {
  return from.size() <= to.size() && std::equal(from.rbegin(), from.rend(), to.rbegin(), [](int a, int b) {
           return a == b || a == 1;
         });
}

bool is_supported_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    const std::optional<mx::array>& mask,
    mx::Stream stream) {
  for (const auto* x : {&q, &k, &v}) {
    if (!is_supported_operand(*x, stream) || x->ndim() != 4 || x->shape(0) != q.shape(0)) {
      return false;
    }
  }
  constexpr int kMaxKeys = 1 << 22;  // bounds the memory for the scores
  if (k.shape(2) > kMaxKeys || q.shape(1) % k.shape(1) != 0 || k.shape(1) != v.shape(1) || k.shape(2) != v.shape(2) ||
      q.shape(3) != k.shape(3)) {
    return false;
  }
  const mx::Shape scores{q.shape(0), q.shape(1), q.shape(2), k.shape(2)};
  return !mask ||
      ((mask->dtype() == mx::bool_ || mask->dtype() == mx::float32) && broadcasts_to(mask->shape(), scores));
}

} // namespace

std::optional<mx::array> rope(
    const mx::array& x,
    int dims,
    float base,
    float scale,
    const mx::array& offset,
    const std::optional<mx::array>& freqs,
    mx::Stream stream) {
  if (!is_supported_operand(x, stream) || x.ndim() != 4 || (freqs && freqs->dtype() != mx::float32)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{x, contiguous(mx::astype(offset, mx::int32, stream), stream)};
  if (freqs) {
    inputs.push_back(contiguous(*freqs, stream));
  }
  const auto make_task = [=](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto& x = inputs[0];
    const ExecutorchMlxRope rope{
        .x = heads_of(x),
        .batch = x.shape(0),
        .heads = x.shape(1),
        .tokens = x.shape(2),
        .width = x.shape(3),
        .half = dims / 2,
        .offsets = inputs[1].data<int32_t>(),
        .offset_per_sequence = inputs[1].size() > 1,
        .periods = inputs.size() > 2 ? inputs[2].data<float>() : nullptr,
        .base = base,
        .scale = scale,
        .y = out.data<void>()};
    return [rope] { executorch_mlx_rope(&rope); };
  };
  return kernel_result("Rope", x.shape(), x.dtype(), std::move(inputs), stream, make_task);
}

std::optional<mx::array> attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    const std::optional<mx::array>& mask,
    mx::Stream stream) {
  if (!is_supported_attention(q, k, v, mask, stream)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{q, k, v};
  if (mask) {
    inputs.push_back(*mask);
  }
  const auto make_task = [=](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    ExecutorchMlxAttention attention{
        .q = heads_of(inputs[0]),
        .k = heads_of(inputs[1]),
        .v = heads_of(inputs[2]),
        .batch = out.shape(0),
        .heads = out.shape(1),
        .kv_heads = inputs[1].shape(1),
        .queries = out.shape(2),
        .keys = inputs[1].shape(2),
        .width = inputs[0].shape(3),
        .v_width = out.shape(3),
        .causal = causal,
        .bool_mask = nullptr,
        .float_mask = nullptr,
        .mask_strides = {},
        .scale = scale,
        .y = out.data<void>()};
    if (inputs.size() > 3) {
      set_mask(attention, inputs[3]);
    }
    return [attention] { executorch_mlx_attention(&attention); };
  };
  auto shape = q.shape();
  shape.back() = v.shape(3);
  return kernel_result("Attention", std::move(shape), q.dtype(), std::move(inputs), stream, make_task);
}

} // namespace executorch_mlx::cpu
