// Random bits, the sampler, and the mask of the tokens that it may draw. See op_row.h.
#pragma once

#include "ops/cpu/cpu_kernels.h"
#include "gpu/sample.h"
#include "memory/views.h"
#include "ops/op_row.h"
#include "random_keys.h"

namespace executorch_mlx {

inline void random_bits(const fb::RandomBitsParams& n, Context& c) {
  check_program(n.width() == 1 || n.width() == 2 || n.width() == 4, "width: got ", n.width(), ", expected 1, 2 or 4");
  const auto shape = c.sizes("shape", *n.shape());
  check_size(shape, mx::uint32);
  const auto key = n.seed() ? mx::random::key(static_cast<uint64_t>(c.integer(n.seed()))) : next_random_key();
  c.set(n.out(), mx::random::bits(shape, n.width(), key, c.stream));
}

// Returns random seeds for the sampler, int64 [count] of 63 random bits. Word 0 of each becomes its upper half.
inline mx::array random_seeds(int count, mx::Stream stream) {
  const auto words = mx::random::bits({count, 2}, 4, next_random_key(), stream);
  const auto bits = mx::bitwise_and(words, mx::array({0x7FFFFFFFu, 0xFFFFFFFFu}), stream);
  const auto seeds = mx::view(mx::take(bits, mx::array({1u, 0u}), 1, stream), mx::int64, stream);
  return mx::reshape(seeds, {count}, stream);
}

// Returns a parameter of the sampler as a vector. Checks its dtype, and that it has one element or one for each row of
// the logits.
inline mx::array sample_parameter(
    const char* name, const mx::array& x, mx::Dtype dtype, const mx::array& logits, const Context& c) {
  check_argument(x.dtype() == dtype && (x.size() == 1 || x.shape() == mx::Shape{logits.shape(0)}), name, ": got ",
      describe(x), ", expected one ", executorch_mlx::name(dtype), " or ", logits.shape(0), " of them");
  return views::reshape(x, {static_cast<int>(x.size())}, c.stream);
}

// Evaluates the operands and draws the tokens at once, on this thread. Serves CPUs for which the runtime has no
// kernels, and sizes that the GPU kernels do not take.
inline mx::array sample_now(SampleInputs inputs, Context& c) {
  const auto evaluate = [&](mx::array& x) {
    x = mx::contiguous(x, /*allow_col_major=*/false, c.stream);
    c.evaluate_now(x);
  };
  for (auto* x : {&inputs.logits, &inputs.temperature, &inputs.top_p, &inputs.seed}) {
    evaluate(*x);
  }
  for (auto* x : {&inputs.top_k, &inputs.min_p}) {
    if (*x) {
      evaluate(**x);
    }
  }
  return gpu::sample_on_host(inputs);
}

inline void sample(const fb::SampleParams& n, Context& c) {
  const auto& logits = c.in(n.logits());
  check_argument(logits.ndim() == 2 && logits.shape(1) > 0 &&
          (logits.dtype() == mx::float32 || logits.dtype() == mx::float16 || logits.dtype() == mx::bfloat16),
      "logits: got ", describe(logits), ", expected float32, float16 or bfloat16 of shape [B, V], V >= 1");
  if (logits.size() == 0) {
    return c.set(n.out(), mx::zeros({0}, mx::int64, c.stream));
  }
  const auto parameter = [&](const char* name, const fb::Tid* tid, mx::Dtype dtype) {
    return sample_parameter(name, c.in(tid), dtype, logits, c);
  };
  const auto optional = [&](const char* name, const fb::Tid* tid, mx::Dtype dtype) {
    return tid == nullptr ? std::nullopt : std::optional(parameter(name, tid, dtype));
  };
  const auto temperature = parameter("temperature", n.temperature(), mx::float32);
  const auto top_p = parameter("top_p", n.top_p(), mx::float32);
  const auto top_k = optional("top_k", n.top_k(), mx::int64);
  const auto min_p = optional("min_p", n.min_p(), mx::float32);
  // If a parameter has an element for each row, each row is drawn as if it were alone, and needs a seed of its own.
  const auto is_per_row = [](const std::optional<mx::array>& x) { return x && x->size() > 1; };
  const bool rows_are_alone = is_per_row(temperature) || is_per_row(top_p) || is_per_row(top_k) || is_per_row(min_p);
  const SampleInputs inputs{.logits = logits,
      .temperature = temperature,
      .top_p = top_p,
      .seed = n.seed() ? parameter("seed", n.seed(), mx::int64)
                       : random_seeds(rows_are_alone ? logits.shape(0) : 1, c.stream),
      .top_k = top_k,
      .min_p = min_p};
  c.count_operations(logits.size(), 4); // about what sampling takes for a logit
  if (const auto tokens = gpu::sample(inputs, c.stream)) {
    return c.set(n.out(), *tokens);
  }
  if (const auto tokens = cpu::sample(inputs, c.stream)) {
    return c.set(n.out(), *tokens);
  }
  c.set(n.out(), sample_now(inputs, c));
}

// Returns whether each token is allowed, bool [B, V], for a mask [B, words].
inline mx::array allowed_tokens(const mx::array& mask, int vocabulary, const Context& c) {
  const auto words = mx::expand_dims(mx::view(mask, mx::uint32, c.stream), -1, c.stream);
  const auto shifted = mx::right_shift(words, mx::arange(0, 32, mx::uint32, c.stream), c.stream);
  const auto bits = mx::bitwise_and(shifted, mx::array(1u), c.stream);
  const auto allowed = mx::flatten(mx::astype(bits, mx::bool_, c.stream), 1, 2, c.stream);
  return mx::slice(allowed, {0, 0}, {mask.shape(0), vocabulary}, c.stream);
}

inline void mask_logits(const fb::MaskLogitsParams& n, Context& c) {
  c.make_available({n.logits(), n.allowed()});
  const auto& logits = c.in(n.logits());
  const auto& allowed = c.in(n.allowed());
  check_argument(
      logits.ndim() == 2 && is_float(logits.dtype()), "logits: got ", describe(logits), ", expected floats [B, V]");
  const int words = logits.shape(1) / 32 + (logits.shape(1) % 32 != 0);
  check_argument(allowed.dtype() == mx::int32 && allowed.shape() == mx::Shape{logits.shape(0), words}, "allowed: got ",
      describe(allowed), ", expected int32[", logits.shape(0), ",", words, "]");
  const auto x = mx::astype(logits, mx::float32, c.stream);
  if (x.size() == 0) {
    return c.set(n.out(), x);
  }
  if (const auto y = cpu::mask_logits(x, allowed, c.stream)) {
    return c.set(n.out(), *y);
  }
  const auto excluded = mx::array(-std::numeric_limits<float>::infinity());
  c.set(n.out(), mx::where(allowed_tokens(allowed, x.shape(1), c), x, excluded, c.stream));
}

constexpr OpRow kRandomRows[] = {
    MLX_ROW(RandomBitsNode, random_bits),
    MLX_ROW(SampleNode, sample),
    MLX_ROW(MaskLogitsNode, mask_logits),
};

} // namespace executorch_mlx
