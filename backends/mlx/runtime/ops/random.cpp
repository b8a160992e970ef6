// Random bits, the sampler, and the mask of the tokens that it may draw. See op.h.
#include <algorithm>
#include <cstring>
#include <limits>

#include "gpu/sample.h"
#include "kernels/cpu/sample.h"
#include "memory/views.h"
#include "memory/kernel_result.h"
#include "ops/op.h"
#include "random_keys.h"

namespace executorch_mlx {

namespace cpu { // kernels for Linux CPUs: see memory/kernel_result.h

namespace {

constexpr int kTokensPerWord = 32;
constexpr uint32_t kAllTokens = ~uint32_t{0};

// The bits of `word` of the last `count` tokens of a row, with 1 for tokens beyond the vocabulary.
uint32_t with_rest(uint32_t word, int count) { return count < kTokensPerWord ? word | kAllTokens << count : word; }

// Calls visit(first, word) for the words of a row, with the number of the first token of the word.
template <typename Visit>
void for_each_word(const uint32_t* words, int vocabulary, Visit&& visit) {
  for (int first = 0; first < vocabulary; first += kTokensPerWord, ++words) {
    visit(first, with_rest(*words, vocabulary - first));
  }
}

void mask_row(const float* logits, const uint32_t* words, int vocabulary, float* y) {
  for_each_word(words, vocabulary, [&](int first, uint32_t word) {
    const int count = std::min(kTokensPerWord, vocabulary - first);
    if (word == kAllTokens) {
      std::memcpy(y + first, logits + first, count * sizeof(float));
      return;
    }
    for (int i = 0; i < count; ++i) {
      y[first + i] = word >> i & 1 ? logits[first + i] : -std::numeric_limits<float>::infinity();
    }
  });
}

// logits [B, V], with minus infinity where the bit of a token in `allowed` is 0: see MaskLogitsNode. The logits are
// float32. Returns the logits themselves if all bits are 1. nullopt also if an operand is lazy.
std::optional<mx::array> mask_logits(const mx::array& logits, const mx::array& allowed, mx::Stream stream) {
  if (!computes_at_once(stream) || logits.dtype() != mx::float32 || !are_available({logits, allowed})) {
    return std::nullopt;
  }
  const auto x = contiguous(logits, stream);
  const auto words = contiguous(allowed, stream);
  const int rows = x.shape(0);
  const int vocabulary = x.shape(1);
  const auto words_of = [&](int row) { return words.data<uint32_t>() + int64_t{row} * words.shape(1); };
  uint32_t common = kAllTokens; // the bits that are 1 in all words
  for (int row = 0; row < rows; ++row) {
    for_each_word(words_of(row), vocabulary, [&](int, uint32_t word) { common &= word; });
  }
  if (common == kAllTokens) {
    return logits;
  }
  auto y = allocate_result(x.shape(), mx::float32);
  for (int row = 0; row < rows; ++row) {
    const int64_t begin = int64_t{row} * vocabulary;
    mask_row(x.data<float>() + begin, words_of(row), vocabulary, y.data<float>() + begin);
  }
  return y;
}

// Draws a token from each row: int64 [rows], as custom_kernel_ops/sample.py defines.
std::optional<mx::array> sample(const SampleInputs& operands, mx::Stream stream) {
  const auto type = float_type(operands.logits.dtype());
  if (!computes_at_once(stream) || !type) {
    return std::nullopt;
  }
  std::vector<mx::array> inputs;
  for (const auto* x : {&operands.logits, &operands.temperature, &operands.top_p, &operands.seed}) {
    inputs.push_back(contiguous(*x, stream));
  }
  for (const auto* x : {&operands.top_k, &operands.min_p}) {
    if (*x) {
      inputs.push_back(contiguous(**x, stream));
    }
  }
  const auto make_task = [type = *type, has_top_k = operands.top_k.has_value(), has_min_p = operands.min_p.has_value()](
                             const std::vector<mx::array>& inputs, mx::array& out) -> Task {
    const auto floats = [](const mx::array& x) { return kernel::Floats{x.data<float>(), x.size() > 1}; };
    const auto integers = [](const mx::array& x) { return kernel::Integers{x.data<int64_t>(), x.size() > 1}; };
    const kernel::Sample sample{.logits = inputs[0].data<char>(),
        .type = type,
        .rows = inputs[0].shape(0),
        .vocabulary = inputs[0].shape(1),
        .temperature = floats(inputs[1]),
        .top_p = floats(inputs[2]),
        .seed = integers(inputs[3]),
        .top_k = has_top_k ? integers(inputs[4]) : kernel::Integers{},
        .min_p = has_min_p ? floats(inputs.back()) : kernel::Floats{},
        .tokens = out.data<int64_t>()};
    return [sample] { kernel::sample(sample); };
  };
  return kernel_result("Sample", {operands.logits.shape(0)}, mx::int64, std::move(inputs), stream, make_task);
}

} // namespace

} // namespace cpu

namespace {

void random_bits(const fb::RandomBitsParams& n, Context& c) {
  check_program(n.width() == 1 || n.width() == 2 || n.width() == 4, "width: got ", n.width(), ", expected 1, 2 or 4");
  const auto shape = c.sizes("shape", *n.shape());
  check_size(shape, mx::uint32);
  const auto key = n.seed() ? mx::random::key(static_cast<uint64_t>(c.integer(n.seed()))) : next_random_key();
  c.set(n.out(), mx::random::bits(shape, n.width(), key, c.stream));
}

// Returns random seeds for the sampler, int64 [count] of 63 random bits. Word 0 of each becomes its upper half.
mx::array random_seeds(int count, mx::Stream stream) {
  const auto words = mx::random::bits({count, 2}, 4, next_random_key(), stream);
  const auto bits = mx::bitwise_and(words, mx::array({0x7FFFFFFFu, 0xFFFFFFFFu}), stream);
  const auto seeds = mx::view(mx::take(bits, mx::array({1u, 0u}), 1, stream), mx::int64, stream);
  return mx::reshape(seeds, {count}, stream);
}

// Returns a parameter of the sampler as a vector. Checks its dtype, and that it has one element or one for each row of
// the logits.
mx::array sample_parameter(
    const char* name, const mx::array& x, mx::Dtype dtype, const mx::array& logits, const Context& c) {
  check_argument(x.dtype() == dtype && (x.size() == 1 || x.shape() == mx::Shape{logits.shape(0)}), name, ": got ",
      describe(x), ", expected one ", executorch_mlx::name(dtype), " or ", logits.shape(0), " of them");
  return views::reshape(x, {static_cast<int>(x.size())}, c.stream);
}

// Evaluates the operands and draws the tokens at once, on this thread. Serves CPUs for which the runtime has no
// kernels, and sizes that the GPU kernels do not take.
mx::array sample_now(SampleInputs inputs, Context& c) {
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

void sample(const fb::SampleParams& n, Context& c) {
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
mx::array allowed_tokens(const mx::array& mask, int vocabulary, const Context& c) {
  const auto words = mx::expand_dims(mx::view(mask, mx::uint32, c.stream), -1, c.stream);
  const auto shifted = mx::right_shift(words, mx::arange(0, 32, mx::uint32, c.stream), c.stream);
  const auto bits = mx::bitwise_and(shifted, mx::array(1u), c.stream);
  const auto allowed = mx::flatten(mx::astype(bits, mx::bool_, c.stream), 1, 2, c.stream);
  return mx::slice(allowed, {0, 0}, {mask.shape(0), vocabulary}, c.stream);
}

void mask_logits(const fb::MaskLogitsParams& n, Context& c) {
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

} // namespace

MLX_OP(RandomBitsNode, random_bits)
MLX_OP(SampleNode, sample)
MLX_OP(MaskLogitsNode, mask_logits)

} // namespace executorch_mlx
