// Quantized KV caches: writes of entries, and attention over them. See cpu_kernels.h.
#include <stdexcept>

#include "memory/views.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/attention_arrays.h"
#include "kernels/cpu/quantized_cache.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

namespace {

kernel::Entries entries_of(const mx::array& entries, const mx::array& scales, const EntryFormat& format) {
  return {.entries = const_cast<uint8_t*>(entries.data<uint8_t>()),
      .entry_strides = {entries.strides(1), entries.strides(2)},
      .scales = const_cast<void*>(scales.data<void>()),
      .scale_type = *float_type(scales.dtype()),
      .scale_strides = {scales.strides(1), scales.strides(2)},
      .groups = scales.shape(3) / 2,
      .bits = format.bits,
      .group_size = format.group_size,
      .rotate = format.rotate};
}

// Returns x[:, :, first:last].
mx::array entries_between(const mx::array& x, int first, int last, mx::Stream stream) {
  mx::Shape start(4, 0);
  mx::Shape stop = x.shape();
  start[2] = first;
  stop[2] = last;
  return views::slice(x, start, stop, mx::Shape(4, 1), stream);
}

} // namespace

std::optional<QuantizedEntries> quantize_entries(
    const std::vector<mx::array>& xs, const EntryFormat& format, mx::Dtype scale_type, mx::Stream stream) {
  int groups = 0;
  for (const auto& x : xs) {
    if (!is_supported_operand(x, stream) || x.ndim() != 4 || x.shape(0) != 1) {
      return std::nullopt;
    }
    groups += format.groups(x.shape(3));
  }
  const auto make_task = [=](const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) -> Task {
    std::vector<kernel::QuantizeEntries> tasks;
    int64_t group = 0;
    for (const auto& x : inputs) {
      tasks.push_back({.x = heads_of(x),
          .heads = x.shape(1),
          .tokens = x.shape(2),
          .width = x.shape(3),
          .to = entries_of(outputs[0], outputs[1], format),
          .first_group = group});
      group += format.groups(x.shape(3));
    }
    return [tasks = std::move(tasks)] {
      for (const auto& task : tasks) {
        kernel::quantize_entries(task);
      }
    };
  };
  auto shape = xs[0].shape();
  shape[3] = format.bytes(groups);
  auto scales_shape = shape;
  scales_shape[3] = 2 * groups;
  auto arrays = kernel_results(
      "QuantizeEntries", {std::move(shape), std::move(scales_shape)}, {mx::uint8, scale_type}, xs, stream, make_task);
  return QuantizedEntries{arrays[0], arrays[1]};
}

std::optional<mx::array> quantized_attention(const QuantizedAttention& a, mx::Stream stream) {
  if (!is_supported_operand(a.q, stream) || !is_supported_operand(a.cache.scales, stream)) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs{a.q};
  for (const auto& x : {a.cache.entries, a.cache.scales}) {
    inputs.push_back(entries_between(x, a.first, a.last, stream));
  }
  if (a.mask) {
    inputs.push_back(*a.mask);
  }
  const auto make_task = [value_group = a.value_group, scale = a.scale, causal = a.causal, format = a.format](
                             const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto& q = inputs[0];
    if (inputs[1].strides(3) != 1 || inputs[2].strides(3) != 1) {
      throw std::invalid_argument("QuantizedAttention: cache: expected a last axis without gaps");
    }
    kernel::QuantizedAttention attention{.q = heads_of(q),
        .cache = entries_of(inputs[1], inputs[2], format),
        .heads = q.shape(1),
        .kv_heads = inputs[1].shape(1),
        .queries = q.shape(2),
        .keys = inputs[1].shape(2),
        .width = q.shape(3),
        .value_group = value_group,
        .value_size = out.shape(3),
        .causal = causal,
        .bool_mask = nullptr,
        .float_mask = nullptr,
        .mask_strides = {},
        .scale = scale,
        .y = out.data<void>()};
    if (inputs.size() > 3) {
      set_mask(attention, inputs[3]);
    }
    return [attention] { kernel::quantized_attention(attention); };
  };
  return attention_result("QuantizedAttention", a.q, a.value_size, std::move(inputs), stream, make_task);
}

} // namespace executorch_mlx::cpu
