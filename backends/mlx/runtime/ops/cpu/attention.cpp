// Attention over float keys and values, and rotary embedding: see cpu_kernels.h.
#include <algorithm>

#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/attention_arrays.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/rope.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

namespace {

bool broadcasts_to(const mx::Shape& from, const mx::Shape& to) {
  return from.size() <= to.size() &&
      std::equal(from.rbegin(), from.rend(), to.rbegin(), [](int a, int b) { return a == b || a == 1; });
}

// `keys`: the number of keys of a query.
bool is_supported_attention(const mx::array& q, const mx::array& k, const mx::array& v, int keys,
    const std::optional<mx::array>& mask, mx::Stream stream) {
  for (const auto* x : {&q, &k, &v}) {
    if (!is_supported_operand(*x, stream) || x->ndim() != 4 || x->shape(0) != q.shape(0)) {
      return false;
    }
  }
  constexpr int kMaxKeys = 1 << 22; // bounds the memory for the scores
  if (keys > kMaxKeys || q.shape(1) % k.shape(1) != 0 || k.shape(1) != v.shape(1) || k.shape(2) != v.shape(2) ||
      q.shape(3) != k.shape(3)) {
    return false;
  }
  const mx::Shape scores{q.shape(0), q.shape(1), q.shape(2), keys};
  return !mask ||
      ((mask->dtype() == mx::bool_ || mask->dtype() == mx::float32) && broadcasts_to(mask->shape(), scores));
}

// The arguments of the kernel for q, k and v without a mask.
kernel::Attention attention_arguments(
    const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal, void* y) {
  return {.q = heads_of(q),
      .k = heads_of(k),
      .v = heads_of(v),
      .batch = q.shape(0),
      .heads = q.shape(1),
      .kv_heads = k.shape(1),
      .queries = q.shape(2),
      .keys = k.shape(2),
      .width = q.shape(3),
      .v_width = v.shape(3),
      .causal = causal,
      .bool_mask = nullptr,
      .float_mask = nullptr,
      .mask_strides = {},
      .scale = scale,
      .y = y};
}

// Moves the beginning of x to the index `index` of axis 2.
void skip(kernel::Heads& x, int64_t index) {
  const int64_t width = x.type == FloatType::float32 ? 4 : 2;
  x.data = static_cast<const char*>(x.data) + index * x.strides[2] * width;
}

} // namespace

std::optional<mx::array> rope(const mx::array& x, int dims, float base, float scale, const mx::array& offset,
    const std::optional<mx::array>& freqs, mx::Stream stream) {
  if (!is_supported_operand(x, stream) || x.ndim() != 4 || (freqs && freqs->dtype() != mx::float32)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{x, contiguous(mx::astype(offset, mx::int32, stream), stream)};
  if (freqs) {
    inputs.push_back(contiguous(*freqs, stream));
  }
  const auto make_task = [=](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto& x = inputs[0];
    const kernel::Rope rope{.x = heads_of(x),
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
    return [rope] { kernel::rope(rope); };
  };
  return kernel_result("Rope", x.shape(), x.dtype(), std::move(inputs), stream, make_task);
}

std::optional<mx::array> attention(const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool causal,
    const std::optional<mx::array>& mask, mx::Stream stream) {
  if (!is_supported_attention(q, k, v, k.ndim() == 4 ? k.shape(2) : 0, mask, stream)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{q, k, v};
  if (mask) {
    inputs.push_back(*mask);
  }
  const auto make_task = [=](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    auto attention = attention_arguments(inputs[0], inputs[1], inputs[2], scale, causal, out.data<void>());
    if (inputs.size() > 3) {
      set_mask(attention, inputs[3]);
    }
    return [attention] { kernel::attention(&attention, 1); };
  };
  return attention_result("Attention", q, v.shape(3), std::move(inputs), stream, make_task);
}

std::optional<mx::array> attention_of_rows(const mx::array& q, const mx::array& k, const mx::array& v, float scale,
    const std::vector<Span>& spans, const std::vector<mx::array>& masks, mx::Stream stream) {
  for (size_t i = 0; i < spans.size(); ++i) {
    const auto mask = masks.empty() ? std::nullopt : std::optional(masks[i]);
    if (!is_supported_attention(q, k, v, spans[i].stop - spans[i].start, mask, stream)) {
      return std::nullopt;
    }
  }
  std::vector<mx::array> inputs{q, k, v};
  inputs.insert(inputs.end(), masks.begin(), masks.end());
  const auto make_task = [=](const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    std::vector<kernel::Attention> rows;
    for (size_t i = 0; i < spans.size(); ++i) {
      auto row = attention_arguments(inputs[0], inputs[1], inputs[2], scale, /*causal=*/false,
          out.data<char>() + i * out.strides(1) * out.itemsize());
      row.queries = 1;
      row.keys = spans[i].stop - spans[i].start;
      skip(row.q, static_cast<int64_t>(i));
      skip(row.k, spans[i].start);
      skip(row.v, spans[i].start);
      if (inputs.size() > 3) {
        set_mask(row, inputs[3 + i]);
      }
      rows.push_back(row);
    }
    return [rows] { kernel::attention(rows.data(), static_cast<int>(rows.size())); };
  };
  return attention_result("AttentionOfRows", q, v.shape(3), std::move(inputs), stream, make_task);
}

} // namespace executorch_mlx::cpu
