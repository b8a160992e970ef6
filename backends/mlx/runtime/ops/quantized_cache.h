// Quantized KV caches: quantizing entries, and attention over them. See op_row.h.
#pragma once

#include "ops/attention.h"
#include "quantized_cache.h"

namespace executorch_mlx {

template <typename Node>
EntryFormat entry_format(const Node& n) {
  check_program(
      (n.bits() == 4 || n.bits() == 8) && (n.group_size() == 32 || n.group_size() == 64 || n.group_size() == 128),
      "got bits ", n.bits(), " and group_size ", n.group_size(), ", expected 4 or 8 bits in groups of 32, 64 or 128");
  return {n.group_size(), n.bits(), n.rotate()};
}

constexpr int kMaxEntryGroups = 1024; // groups of an entry

// Pads the last axis of x with zeros to whole groups, as float32, and rotates each group if the format asks for it.
inline mx::array padded_groups(const mx::array& x, const EntryFormat& format, const Context& c) {
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
inline QuantizedEntries quantize_with_mlx(
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

inline void quantize_entries(const fb::QuantizeEntriesParams& n, Context& c) {
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
inline mx::array dequantized(const QuantizedAttention& a, int group, int width, const Context& c) {
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
inline mx::array attend_with_mlx(const QuantizedAttention& a, const Context& c) {
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

inline void check_cache(const fb::QuantizedSdpaParams& n, const QuantizedAttention& a) {
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

inline void quantized_sdpa(const fb::QuantizedSdpaParams& n, Context& c) {
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

constexpr OpRow kQuantizedCacheRows[] = {
    MLX_ROW(QuantizeEntriesNode, quantize_entries),
    MLX_ROW(QuantizedSdpaNode, quantized_sdpa),
};

} // namespace executorch_mlx
