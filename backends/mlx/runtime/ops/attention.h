#pragma once

#include "one_pass.h"
#include "ops/linalg.h"

namespace executorch_mlx {

inline void rope(const fb::RopeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  check_argument(x.ndim() >= 3, "x has ", x.ndim(), " axes, at least 3 were expected");
  check_program(
      n.dims() > 0 && n.dims() % 2 == 0 && n.dims() <= x.shape(-1),
      "dims ", n.dims(), " is no even number in (0, ", x.shape(-1), "]");
  const auto freqs = c.optional(n.freqs());
  check_argument(
      !freqs || (freqs->ndim() == 1 && freqs->shape(0) == n.dims() / 2),
      "freqs is ", describe(freqs.value_or(x)), ", shape [", n.dims() / 2, "] was expected");
  const auto base = freqs ? std::nullopt : std::optional<float>(n.base());
  if (x.size() == 0) {
    return c.set(n.out(), x);
  }
  const auto offset = n.offset()->is_vid() ? mx::array(c.size("offset", c.integer(n.offset()->vid())))
                                           : c.in(n.offset()->tid());
  check_argument(
      is_integral(offset.dtype()) && offset.ndim() <= 1 &&
          (offset.size() == 1 || offset.size() == static_cast<size_t>(x.shape(0))),
      "offset is ", describe(offset), ", one integer or ", x.shape(0), " were expected");
  if (!n.traditional()) {
    if (const auto y = rope_in_one_pass(x, n.dims(), n.base(), n.scale(), offset, freqs, c.stream)) {
      return c.set(n.out(), *y);
    }
  }
  c.set(n.out(), mx::fast::rope(x, n.dims(), n.traditional(), base, n.scale(), offset, freqs, c.stream));
}

// `mode` is "causal", "array" or empty, as MLX has it.
inline mx::array attend(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    const std::string& mode,
    const std::optional<mx::array>& mask,
    const Context& c) {
  if (wants_float32(q, c)) {
    const auto in_float32 = attend(
        to_float32(q, c), to_float32(k, c), to_float32(v, c), scale, mode,
        mask ? std::optional(to_float32(*mask, c)) : mask, c);
    return mx::astype(in_float32, q.dtype(), c.stream);
  }
  if (const auto y = attention_in_one_pass(q, k, v, scale, mode == "causal", mask, c.stream)) {
    return *y;
  }
  return mx::fast::scaled_dot_product_attention(
      q, k, v, scale, mode, mask, std::nullopt, /*force_fused=*/false, c.stream);
}

inline void sdpa(const fb::SdpaParams& n, Context& c) {
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  for (const auto* x : {&q, &k, &v}) {
    check_argument(x->ndim() == 4, "an operand is ", describe(*x), ", 4 axes were expected");
  }
  auto mask = c.optional(n.mask());
  check_program(!(mask && n.causal()), "both mask and causal are there");
  if (mask && is_float(mask->dtype())) {
    mask = mx::astype(*mask, q.dtype(), c.stream);
  }
  c.set(n.out(), attend(q, k, v, n.scale(), n.causal() ? "causal" : "", mask, c));
}

// The first of `tokens` positions [tokens, 1], which have to follow one another.
// A cache has to know them when the instruction is met.
inline int first_position(const mx::array& position, int tokens, Context& c) {
  check_argument(
      position.ndim() == 2 && position.shape(0) == tokens && position.shape(1) == 1 && is_integral(position.dtype()),
      "position is ", describe(position), ", integers of shape [", tokens, ",1] were expected");
  mx::array on_host = position;
  if (!is_on_host(on_host)) {
    on_host = mx::contiguous(on_host, /*allow_col_major=*/false, c.stream);
    c.evaluate_now(on_host);
  }
  int64_t first = 0;
  int64_t count = 0;
  for_each_integer(on_host, [&](int64_t p) {
    first = count == 0 ? p : first;
    check_argument(p >= 0 && p - first == count, "position ", p, " is number ", count, " after ", first);
    ++count;
  });
  return c.size("position", first);
}

// k and v go into the runtime's cache, and each query attends to the positions up to
// its own that the cache keeps. Cells have the dtype of k and v, attention that of q.
inline void update_and_attend(const fb::UpdateAndAttendParams& n, Context& c) {
  const auto& q = c.in(n.q());
  const auto& k = c.in(n.k());
  const auto& v = c.in(n.v());
  for (const auto* x : {&q, &k, &v}) {
    check_argument(x->ndim() == 4, "an operand is ", describe(*x), ", 4 axes were expected");
  }
  const int tokens = q.shape(2);
  check_argument(
      q.size() > 0 && v.size() > 0 && k.shape(2) == tokens && v.shape(2) == tokens && k.shape(0) == q.shape(0) &&
          v.shape(0) == q.shape(0) && v.shape(1) == k.shape(1) && k.shape(3) == q.shape(3) &&
          q.shape(1) % k.shape(1) == 0,
      "q is ", describe(q), ", k ", describe(k), " and v ", describe(v), ", which do not go together");
  const auto history = c.cache(*n.layer_id()).append(k, v, first_position(c.in(n.position()), tokens, c), c.stream);
  const auto attended = attend(
      q, mx::astype(history.keys, q.dtype(), c.stream), mx::astype(history.values, q.dtype(), c.stream), *n.scale(),
      history.mask_mode, history.mask, c);
  c.set(n.out(), n.out_dtype() ? mx::astype(attended, dtype_of(*n.out_dtype()), c.stream) : attended);
}

constexpr Row kAttentionRows[] = {
    MLX_ROW(RopeNode, rope),
    MLX_ROW(SdpaNode, sdpa),
    MLX_ROW(UpdateAndAttendNode, update_and_attend),
};

} // namespace executorch_mlx
