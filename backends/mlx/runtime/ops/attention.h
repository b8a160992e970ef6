#pragma once

#include "ops/row.h"

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
  if (n.offset()->is_vid()) {
    const int offset = c.size("offset", c.integer(n.offset()->vid()));
    return c.set(
        n.out(), mx::fast::rope(x, n.dims(), n.traditional(), base, n.scale(), offset, freqs, c.stream));
  }
  const auto& offset = c.in(n.offset()->tid());
  check_argument(
      is_integral(offset.dtype()) && offset.ndim() <= 1 &&
          (offset.size() == 1 || offset.size() == static_cast<size_t>(x.shape(0))),
      "offset is ", describe(offset), ", one integer or ", x.shape(0), " were expected");
  c.set(n.out(), mx::fast::rope(x, n.dims(), n.traditional(), base, n.scale(), offset, freqs, c.stream));
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
  c.set(
      n.out(),
      mx::fast::scaled_dot_product_attention(
          q, k, v, n.scale(), n.causal() ? "causal" : "", mask, std::nullopt, /*force_fused=*/false, c.stream));
}

// The verifier refuses the node while the runtime has no cache for it.
inline void update_and_attend(const fb::UpdateAndAttendParams&, Context&) {
  fail(Error::NotSupported, "this build has no runtime cache of keys and values");
}

constexpr Row kAttentionRows[] = {
    MLX_ROW(RopeNode, rope),
    MLX_ROW(SdpaNode, sdpa),
    MLX_ROW(UpdateAndAttendNode, update_and_attend),
};

} // namespace executorch_mlx
