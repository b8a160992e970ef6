// Quantized KV caches: quantizing entries, and attention over them. See op.h.
#include <stdexcept>

#include "kernels/cpu/quantized_attention.h"
#include "memory/views.h"
#include "ops/attention.h"
#include "ops/cpu/attention_arrays.h"
#include "memory/kernel_result.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace {

// The format is that of custom_ops/quantized_cache.py.

// How the entries of a cache are quantized.
struct EntryFormat {
  int group_size;
  int bits;
  bool rotate; // whether each group is rotated before it is quantized

  // The number of groups that hold `width` values.
  int groups(int width) const { return static_cast<int>((int64_t{width} + group_size - 1) / group_size); }
  // The size of this many quantized groups, without scales and biases.
  int bytes(int groups) const { return groups * group_size * bits / 8; }
};

// The entries of N positions and G key heads. `entries` is uint8 [B, G, N, bytes]. `scales` [B, G, N, 2 * groups] has
// the scales of the groups, then their biases.
struct QuantizedEntries {
  mx::array entries;
  mx::array scales;
};

// Attention of q [1, H, S, D] over the positions [first, last) of a cache.
struct QuantizedAttention {
  mx::array q;
  QuantizedEntries cache;
  EntryFormat format;
  int first;
  int last;
  int value_group; // the group of an entry at which the values begin
  int value_size;
  float scale;
  bool causal;
  std::optional<mx::array> mask;
};

} // namespace

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

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

// Quantizes the tensors xs [1, heads, tokens, width] of float32, float16 or bfloat16, each padded with zeros to whole
// groups. An entry holds the quantized vectors of xs[0], xs[1], ... of one head and token, concatenated.
std::optional<QuantizedEntries> quantize_entries(
    const std::vector<mx::array>& xs, const EntryFormat& format, mx::Dtype scale_type, mx::Stream stream) {
  int groups = 0;
  for (const auto& x : xs) {
    if (!is_supported_operand(x, stream) || x.ndim() != 4 || x.shape(0) != 1) {
      return std::nullopt;
    }
    groups += format.groups(x.shape(3));
  }
  const auto make_task = [=](const auto& inputs, auto& outputs) -> Task {
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

// Like `attention` over the dequantized keys and values. Every query must see at least one key, and the last axis of
// the entries and scales must be contiguous.
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

} // namespace

} // namespace cpu

namespace {

template <typename Node>
EntryFormat entry_format(const Node& n) {
  check_program(
      (n.bits() == 4 || n.bits() == 8) && (n.group_size() == 32 || n.group_size() == 64 || n.group_size() == 128),
      "got bits ", n.bits(), " and group_size ", n.group_size(), ", expected 4 or 8 bits in groups of 32, 64 or 128");
  return {n.group_size(), n.bits(), n.rotate()};
}

constexpr int kMaxEntryGroups = 1024; // groups of an entry

// Pads the last axis of x with zeros to whole groups, as float32, and rotates each group if the format asks for it.
mx::array padded_groups(const mx::array& x, const EntryFormat& format, const Context& c) {
  const int width = format.groups(x.shape(-1)) * format.group_size;
  auto y = mx::astype(x, mx::float32, c.stream);
  if (width > x.shape(-1)) {
    y = mx::pad(y, std::vector<int>{-1}, {0}, {width - x.shape(-1)}, mx::array(0.0f), "constant", c.stream);
  }
  if (format.rotate) {
    y = mx::hadamard_transform(mx::unflatten(y, -1, {-1, format.group_size}, c.stream), std::nullopt, c.stream);
    y = mx::flatten(y, -2, -1, c.stream);
  }
  return y;
}

// Returns the quantized entries, computed with operations of MLX.
QuantizedEntries quantize_with_mlx(
    const std::vector<mx::array>& xs, const EntryFormat& format, mx::Dtype scale_type, const Context& c) {
  std::vector<mx::array> parts;
  for (const auto& x : xs) {
    parts.push_back(padded_groups(x, format, c));
  }
  const auto x = mx::unflatten(mx::concatenate(std::move(parts), -1, c.stream), -1, {-1, format.group_size}, c.stream);
  const auto number = [](float value) { return mx::array(value); };
  const auto max_level = static_cast<float>((1 << format.bits) - 1);
  const auto low = mx::min(x, -1, /*keepdims=*/true, c.stream);
  const auto range = mx::subtract(mx::max(x, -1, /*keepdims=*/true, c.stream), low, c.stream);
  const auto biases = mx::astype(low, scale_type, c.stream);
  const auto scales = mx::astype(mx::divide(range, number(max_level), c.stream), scale_type, c.stream);
  auto divisor = mx::astype(scales, mx::float32, c.stream);
  divisor = mx::where(mx::equal(divisor, number(0), c.stream), number(1), divisor, c.stream);
  const auto distance = mx::subtract(x, mx::astype(biases, mx::float32, c.stream), c.stream);
  auto q = mx::round(mx::divide(distance, divisor, c.stream), 0, c.stream);
  q = mx::astype(mx::clip(q, number(0), number(max_level), c.stream), mx::uint8, c.stream);
  if (format.bits == 4) {
    const auto pairs = mx::split(mx::unflatten(q, -1, {-1, 2}, c.stream), 2, -1, c.stream);
    q = mx::squeeze(
        mx::bitwise_or(pairs[0], mx::left_shift(pairs[1], mx::array(uint8_t{4}), c.stream), c.stream), -1, c.stream);
  }
  return {mx::flatten(q, -2, -1, c.stream),
      mx::concatenate({mx::squeeze(scales, -1, c.stream), mx::squeeze(biases, -1, c.stream)}, -1, c.stream)};
}

void quantize_entries(const fb::QuantizeEntriesParams& n, Context& c) {
  const auto format = entry_format(n);
  const auto scale_type = dtype_of(n.scale_type());
  check_program(is_float(scale_type), "scale_type: got ", name(scale_type), ", expected a float dtype");
  c.make_available(*n.xs());
  const auto xs = c.list(*n.xs());
  check_program(!xs.empty(), "xs: got no tensors");
  int64_t groups = 0;
  for (const auto& x : xs) {
    check_argument(x.ndim() == 4 && is_float(x.dtype()) && x.shape(0) == xs[0].shape(0) &&
            x.shape(1) == xs[0].shape(1) && x.shape(2) == xs[0].shape(2),
        "xs: got ", describe(x), " beside ", describe(xs[0]),
        ", expected floats with 4 axes that differ in the last only");
    groups += format.groups(x.shape(3));
    c.count_operations(x.size(), format.group_size);
  }
  check_argument(
      groups > 0 && groups <= kMaxEntryGroups, "xs: got ", groups, " groups, expected 1 to ", kMaxEntryGroups);
  auto result = cpu::quantize_entries(xs, format, scale_type, c.stream);
  if (!result) {
    result = quantize_with_mlx(xs, format, scale_type, c);
  }
  c.set(n.out(), result->entries);
  c.set(n.out_scales(), result->scales);
}

// Returns `width` numbers of each entry that `a` attends to, from the group with the index `group` on. The width is
// rounded up to whole groups. If the format rotates groups, the result has the rotated groups.
mx::array dequantized(const QuantizedAttention& a, int group, int width, const Context& c) {
  const auto part = [&](const mx::array& x, int first, int count) {
    const mx::Shape start{0, 0, a.first, first};
    const mx::Shape stop{1, x.shape(1), a.last, first + count};
    return mx::slice(x, start, stop, c.stream);
  };
  const int groups = a.format.groups(width);
  const int entry_groups = a.cache.scales.shape(3) / 2;
  const int group_words = a.format.bytes(1) / 4; // 32-bit words of a group
  const auto packed = mx::view(a.cache.entries, mx::uint32, c.stream);
  return mx::dequantize(part(packed, group * group_words, groups * group_words), part(a.cache.scales, group, groups),
      part(a.cache.scales, entry_groups + group, groups), a.format.group_size, a.format.bits, "affine",
      /*global_scale=*/std::nullopt, a.q.dtype(), c.stream);
}

// Returns the attention, computed with operations of MLX.
mx::array attend_with_mlx(const QuantizedAttention& a, const Context& c) {
  const auto q = mx::astype(padded_groups(a.q, a.format, c), a.q.dtype(), c.stream);
  auto y = attend(q, dequantized(a, 0, a.q.shape(3), c), dequantized(a, a.value_group, a.value_size, c), a.scale,
      a.causal, a.mask, c);
  if (a.format.rotate) { // rotating a second time restores the groups
    y = mx::astype(padded_groups(y, a.format, c), a.q.dtype(), c.stream);
  }
  mx::Shape stop = y.shape();
  stop[3] = a.value_size;
  return mx::slice(y, mx::Shape(4, 0), stop, c.stream);
}

void check_cache(const fb::QuantizedSdpaParams& n, const QuantizedAttention& a) {
  const auto& [entries, scales] = a.cache;
  check_argument(a.q.ndim() == 4 && entries.ndim() == 4 && scales.ndim() == 4 && is_float(a.q.dtype()) &&
          entries.dtype() == mx::uint8 && is_float(scales.dtype()) && a.q.shape(0) == 1 && entries.shape(0) == 1,
      "got q ", describe(a.q), ", cache ", describe(entries), " and scales ", describe(scales),
      ", expected floats, uint8 and floats with 4 axes, the first of size 1");
  const int groups = scales.shape(3) / 2;
  auto expected = entries.shape();
  expected[3] = 2 * groups;
  check_argument(groups > 0 && groups <= kMaxEntryGroups && scales.shape() == expected &&
          entries.shape(3) == a.format.bytes(groups),
      "scales: got ", describe(scales), " for the cache ", describe(entries), ", expected two for each group of ",
      n.group_size(), " numbers of ", n.bits(), " bits");
  check_argument(a.q.size() > 0 && entries.shape(1) > 0 && a.q.shape(1) % entries.shape(1) == 0 &&
          a.format.groups(a.q.shape(3)) <= groups,
      "q: got ", describe(a.q), " for the cache ", describe(entries));
  check_argument(n.value_offset() >= 0 && n.value_offset() % n.group_size() == 0 && n.value_size() > 0 &&
          n.value_size() <= groups * n.group_size() && a.value_group + a.format.groups(n.value_size()) <= groups,
      "values: got offset ", n.value_offset(), " and size ", n.value_size(), " in entries of ", groups, " groups");
}

void quantized_sdpa(const fb::QuantizedSdpaParams& n, Context& c) {
  c.make_available({n.q(), n.mask()});
  const auto format = entry_format(n);
  QuantizedAttention a{.q = c.in(n.q()),
      .cache = {c.in(n.cache()), c.in(n.scales())},
      .format = format,
      .first = c.checked_int("start", n.start()),
      .last = c.checked_int("stop", n.stop()),
      .value_group = n.value_offset() / format.group_size,
      .value_size = n.value_size(),
      .scale = n.scale(),
      .causal = n.causal(),
      .mask = c.optional(n.mask())};
  check_cache(n, a);
  const int keys = a.last - a.first;
  check_argument(a.first >= 0 && a.first < a.last && a.last <= a.cache.entries.shape(2), "got start ", a.first,
      " and stop ", a.last, ", expected entries in [0, ", a.cache.entries.shape(2), "]");
  check_program(!(a.mask && a.causal), "mask: expected none if causal is true");
  check_argument(!a.causal || keys >= a.q.shape(2), "causal: got ", a.q.shape(2), " queries and ", keys, " keys");
  if (a.mask) {
    const mx::Shape scores{1, a.q.shape(1), a.q.shape(2), keys};
    check_argument((a.mask->dtype() == mx::bool_ || is_float(a.mask->dtype())) &&
            mx::broadcast_shapes(a.mask->shape(), scores) == scores,
        "mask: got ", describe(*a.mask), ", expected bool or floats that broadcast to ", dims(scores));
  }
  c.count_operations(a.q.size(), keys);
  c.expect_product({1, a.q.shape(1), a.q.shape(2), a.value_size}, a.q.dtype(), keys);
  if (a.mask && is_float(a.mask->dtype())) {
    a.mask = mx::astype(*a.mask, c.stream.device == mx::Device::cpu ? mx::float32 : a.q.dtype(), c.stream);
  }
  const auto y = cpu::quantized_attention(a, c.stream);
  c.set(n.out(), y ? *y : attend_with_mlx(a, c));
}

} // namespace

MLX_OP(QuantizeEntriesNode, quantize_entries)
MLX_OP(QuantizedSdpaNode, quantized_sdpa)

} // namespace executorch_mlx
