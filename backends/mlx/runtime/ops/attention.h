// Attention, with and without a KV cache of the runtime, and rotary position embeddings. See op_row.h.
#pragma once

#include "ops/cpu/cpu_kernels.h"
#include "gpu/fused.h"
#include "ops/linalg.h"

namespace executorch_mlx {

// The checked operands of a RopeNode.
struct RopeOperands {
  mx::array x;
  mx::array offset;
  std::optional<mx::array> freqs;
};

inline RopeOperands rope_operands(const fb::RopeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  check_argument(x.ndim() >= 3, "x: got ", x.ndim(), " axes, expected at least 3");
  check_program(n.dims() > 0 && n.dims() % 2 == 0 && n.dims() <= x.shape(-1), "dims: got ", n.dims(),
      ", expected an even number in (0, ", x.shape(-1), "]");
  auto freqs = c.optional(n.freqs());
  check_argument(!freqs || (freqs->ndim() == 1 && freqs->shape(0) == n.dims() / 2), "freqs: got ",
      describe(freqs.value_or(x)), ", expected shape [", n.dims() / 2, "]");
  auto offset =
      n.offset()->is_vid() ? mx::array(c.checked_int("offset", c.integer(n.offset()->vid()))) : c.in(n.offset()->tid());
  check_argument(x.size() == 0 ||
          (is_integral(offset.dtype()) && offset.ndim() <= 1 &&
              (offset.size() == 1 || offset.size() == static_cast<size_t>(x.shape(0)))),
      "offset: got ", describe(offset), ", expected 1 or ", x.shape(0), " integers");
  return {x, std::move(offset), std::move(freqs)};
}

inline void rope(const fb::RopeParams& n, Context& c) {
  c.make_available({n.x(), n.offset()->is_vid() ? nullptr : n.offset()->tid()});
  const auto [x, offset, freqs] = rope_operands(n, c);
  if (x.size() == 0) {
    return c.set(n.out(), x);
  }
  const auto y = n.traditional() ? std::nullopt : cpu::rope(x, n.dims(), n.base(), n.scale(), offset, freqs, c.stream);
  if (y) {
    return c.set(n.out(), *y);
  }
  const auto base = freqs ? std::nullopt : std::optional<float>(n.base());
  c.set(n.out(), mx::fast::rope(x, n.dims(), n.traditional(), base, n.scale(), offset, freqs, c.stream));
}

// Returns scaled dot-product attention in the dtype of q. `is_causal`: the last query attends to all keys, the query
// before it to all but the last key, and so on. k and v are read in their own dtype or cast to that of q. For half
// precision on the CPU, computes in float32.
inline mx::array attend(const mx::array& q, const mx::array& k, const mx::array& v, float scale, bool is_causal,
    const std::optional<mx::array>& mask, const Context& c) {
  // A single query attends to all keys. For such a query, the causal kernel takes 40 us on an NVIDIA GPU, and the other
  // kernel 12 us.
  is_causal = is_causal && q.shape(2) > 1;
  const bool in_float32 = computes_in_float32(q, c);
  if (const auto y = mask ? std::nullopt : gpu::attention_of_token(q, k, v, scale, c.stream)) {
    return *y;
  }
  const auto wide_mask = mask && in_float32 ? std::optional(to_float32(*mask, c)) : mask;
  if (const auto y = cpu::attention(q, k, v, scale, is_causal, wide_mask, c.stream)) {
    return *y;
  }
  if (in_float32) {
    const auto y = attend(to_float32(q, c), to_float32(k, c), to_float32(v, c), scale, is_causal, wide_mask, c);
    return mx::astype(y, q.dtype(), c.stream);
  }
  return mx::fast::scaled_dot_product_attention(q, mx::astype(k, q.dtype(), c.stream),
      mx::astype(v, q.dtype(), c.stream), scale, is_causal ? "causal" : "", mask, std::nullopt, /*force_fused=*/false,
      c.stream);
}

inline void check_rank_4(const mx::array& q, const mx::array& k, const mx::array& v) {
  check_argument(q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4, "got q ", describe(q), ", k ", describe(k), " and v ",
      describe(v), ", expected 4 axes each");
}

inline void sdpa(const fb::SdpaParams& n, Context& c) {
  c.make_available({n.q(), n.k(), n.v(), n.mask()});
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  check_rank_4(q, k, v);
  if (q.size() == 0 || k.size() == 0 || v.size() == 0) { // MLX divides by the number of heads
    return c.set(n.out(), mx::zeros({q.shape(0), q.shape(1), q.shape(2), v.shape(3)}, q.dtype(), c.stream));
  }
  auto mask = c.optional(n.mask());
  check_program(!(mask && n.causal()), "mask: expected none if causal is true");
  if (mask && is_float(mask->dtype())) {
    mask = mx::astype(*mask, q.dtype(), c.stream);
  }
  c.count_operations(q.size(), k.shape(2));
  c.expect_product({q.shape(0), q.shape(1), q.shape(2), v.shape(3)}, q.dtype(), k.shape(2));
  c.set(n.out(), attend(q, k, v, n.scale(), n.causal(), mask, c));
}

// Reads the ranges of a RowSdpaNode. Each contains at least one of the `length` keys.
inline std::vector<Span> checked_spans(const fb::RowSdpaParams& n, int length, Context& c) {
  const auto starts = c.sizes("starts", *n.starts());
  const auto stops = c.sizes("stops", *n.stops());
  check_program(starts.size() == stops.size(), "stops: got ", stops.size(), " numbers, expected ", starts.size());
  std::vector<Span> spans;
  for (size_t i = 0; i < starts.size(); ++i) {
    check_argument(starts[i] < stops[i] && stops[i] <= length, "got start ", starts[i], " and stop ", stops[i],
        ", expected keys in [0, ", length, ")");
    spans.push_back({starts[i], stops[i]});
  }
  return spans;
}

// x[:, :, start:stop], for x with 4 axes
inline mx::array slice_positions(const mx::array& x, int start, int stop, const Context& c) {
  const Slices at(x, {2, start, stop});
  return views::slice(x, at.start, at.stop, at.steps, c.stream);
}

inline void row_sdpa(const fb::RowSdpaParams& n, Context& c) {
  c.make_available({n.q(), n.k(), n.v()});
  if (n.masks() != nullptr) {
    c.make_available(*n.masks());
  }
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  check_rank_4(q, k, v);
  const auto spans = checked_spans(n, std::min(k.shape(2), v.shape(2)), c);
  const int rows = q.shape(2);
  check_argument(q.size() > 0 && q.shape(0) == 1 && static_cast<size_t>(rows) == spans.size(), "q: got ", describe(q),
      ", expected a query for each of ", spans.size(), " rows");
  const mx::Shape shape{1, q.shape(1), rows, v.shape(3)};
  if (k.size() == 0 || v.size() == 0) { // MLX and the kernel divide by the number of heads
    return c.set(n.out(), mx::zeros(shape, q.dtype(), c.stream));
  }
  auto masks = n.masks() ? c.list(*n.masks()) : std::vector<mx::array>{};
  check_program(
      masks.empty() || masks.size() == spans.size(), "masks: got ", masks.size(), ", expected 0 or ", spans.size());
  for (size_t i = 0; i < masks.size(); ++i) {
    auto& mask = masks[i];
    const mx::Shape scores{1, q.shape(1), 1, spans[i].stop - spans[i].start};
    check_argument(mx::broadcast_shapes(mask.shape(), scores) == scores, "masks: got ", describe(mask),
        ", expected an array that broadcasts to ", dims(scores));
    mask = is_float(mask.dtype()) ? mx::astype(mask, q.dtype(), c.stream) : mask;
    mask = computes_in_float32(q, c) ? to_float32(mask, c) : mask;
  }
  check_size(shape, q.dtype());
  for (const auto& [start, stop] : spans) {
    c.count_operations(q.size() / rows, stop - start);
    c.count_operations(uint64_t(q.shape(1)) * v.shape(3), stop - start);
  }
  if (const auto y = cpu::attention_of_rows(q, k, v, n.scale(), spans, masks, c.stream)) {
    return c.set(n.out(), *y);
  }
  if (const auto y = masks.empty() ? gpu::attention_of_rows(q, k, v, n.scale(), spans, c.stream) : std::nullopt) {
    return c.set(n.out(), *y);
  }
  std::vector<mx::array> results;
  for (int i = 0; i < rows; ++i) {
    const auto [start, stop] = spans[i];
    results.push_back(
        attend(slice_positions(q, i, i + 1, c), slice_positions(k, start, stop, c), slice_positions(v, start, stop, c),
            n.scale(), /*is_causal=*/false, masks.empty() ? std::nullopt : std::optional(masks[i]), c));
  }
  c.set(n.out(), mx::concatenate(std::move(results), 2, c.stream));
}

// Asks the processor to load x[:, :, index], which is about to be written.
inline void prefetch_position(const mx::array& x, int index) {
  constexpr int64_t kCacheLine = 64;
  const int64_t width = x.itemsize();
  for (int batch = 0; batch < x.shape(0); ++batch) {
    for (int head = 0; head < x.shape(1); ++head) {
      const int64_t offset = batch * x.strides(0) + head * x.strides(1) + index * x.strides(2);
      const char* begin = x.data<char>() + offset * width;
      for (int64_t i = 0; i < x.shape(3) * width; i += kCacheLine) {
        __builtin_prefetch(begin + i, /*rw=*/1);
      }
    }
  }
}

inline void row_update(const fb::RowUpdateParams& n, Context& c) {
  c.make_available({n.update()});
  const auto update = c.in(n.update());
  auto dst = c.in_for_update(n.dst(), n.out());
  const auto starts = c.sizes("starts", *n.starts());
  auto expected = dst.shape();
  if (dst.ndim() == 4) {
    expected[2] = static_cast<int>(starts.size());
  }
  check_argument(dst.ndim() == 4 && update.dtype() == dst.dtype() && update.shape() == expected, "update: got ",
      describe(update), ", expected ", starts.size(), " positions for ", describe(dst));
  for (const int start : starts) {
    check_argument(
        start < dst.shape(2), "starts: got ", start, ", expected less than ", dst.shape(2), " for ", describe(dst));
  }
  if (starts.empty() || dst.size() == 0) {
    return c.set(n.out(), dst);
  }
  if (dst.is_available() && dst.strides(3) == 1 && c.stream.device == mx::Device::cpu) {
    for (const int start : starts) {
      prefetch_position(dst, start);
    }
  }
  if (c.set_positions(n.out(), dst, update, starts)) {
    return;
  }
  for (size_t i = 0; i < starts.size(); ++i) {
    if (i > 0) {
      dst = c.in_for_update(n.out(), n.out());
    }
    const Slices at(dst, {2, starts[i], starts[i] + 1});
    const auto index = static_cast<int>(i);
    c.set_updated(n.out(), std::move(dst), slice_positions(update, index, index + 1, c), at.start, at.stop, at.steps);
  }
}

// Checks that `position` [tokens, 1] contains consecutive integers, and returns the first one. If the positions are not
// on the host, evaluates them now, because the KV cache needs the number while the graph is being built.
inline int first_position(const mx::array& position, int tokens, Context& c) {
  check_argument(
      position.ndim() == 2 && position.shape(0) == tokens && position.shape(1) == 1 && is_integral(position.dtype()),
      "position: got ", describe(position), ", expected integers of shape [", tokens, ",1]");
  mx::array on_host = position;
  if (!is_on_host(on_host)) {
    on_host = mx::contiguous(on_host, /*allow_col_major=*/false, c.stream);
    c.evaluate_now(on_host);
  }
  int64_t first = 0;
  int64_t count = 0;
  for_each_integer(on_host, [&](int64_t p) {
    first = count == 0 ? p : first;
    check_argument(p >= 0 && p - first == count, "position: got ", p, " at index ", count,
        ", expected consecutive integers of 0 or more");
    ++count;
  });
  return c.checked_int("position", first);
}

// Appends k and v to the KV cache of the layer. Each query then attends to the cached positions up to its own. The
// cache keeps the dtype of k and v. Attention is computed in the dtype of q.
inline void update_and_attend(const fb::UpdateAndAttendParams& n, Context& c) {
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  check_rank_4(q, k, v);
  const int tokens = q.shape(2);
  check_argument(q.size() > 0 && v.size() > 0 && k.shape(2) == tokens && v.shape(2) == tokens &&
          k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0) && v.shape(1) == k.shape(1) &&
          k.shape(3) == q.shape(3) && q.shape(1) % k.shape(1) == 0,
      "got q ", describe(q), ", k ", describe(k), " and v ", describe(v),
      ", expected matching batch, heads, tokens and head_dim");
  const auto inputs = c.cache(*n.layer_id()).append(k, v, first_position(c.in(n.position()), tokens, c), c.stream);
  c.count_operations(q.size(), inputs.keys.shape(2));
  c.expect_product({q.shape(0), q.shape(1), tokens, v.shape(3)}, q.dtype(), inputs.keys.shape(2));
  const auto attended = attend(q, inputs.keys, inputs.values, *n.scale(), inputs.is_causal, inputs.mask, c);
  c.set(n.out(), n.out_dtype() ? mx::astype(attended, dtype_of(*n.out_dtype()), c.stream) : attended);
}

constexpr OpRow kAttentionRows[] = {
    MLX_ROW(RopeNode, rope),
    MLX_ROW(SdpaNode, sdpa),
    MLX_ROW(RowSdpaNode, row_sdpa),
    MLX_ROW(RowUpdateNode, row_update),
    MLX_ROW(UpdateAndAttendNode, update_and_attend),
};

} // namespace executorch_mlx
