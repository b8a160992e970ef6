// Masks of tokens: bit t % 32 of word t / 32 says whether token t may be drawn.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace executorch_mlx::engine {

constexpr int64_t kTokensPerWord = 32;
constexpr int32_t kAllTokens = -1; // a word that allows all of its tokens

// The number of words for a vocabulary.
constexpr size_t mask_words(int64_t vocab_size) {
  return static_cast<size_t>((vocab_size + kTokensPerWord - 1) / kTokensPerWord);
}

constexpr int32_t mask_bit(int64_t token) { return static_cast<int32_t>(uint32_t{1} << (token % kTokensPerWord)); }

inline bool is_allowed(std::span<const int32_t> mask, int64_t token) {
  return (mask[token / kTokensPerWord] & mask_bit(token)) != 0;
}

inline void allow(std::span<int32_t> mask, int64_t token) { mask[token / kTokensPerWord] |= mask_bit(token); }

inline void forbid(std::span<int32_t> mask, int64_t token) { mask[token / kTokensPerWord] &= ~mask_bit(token); }

// Whether the mask allows a token of the vocabulary. Bits beyond the vocabulary do not count.
inline bool allows_any(std::span<const int32_t> mask, int64_t vocab_size) {
  const int64_t rest = vocab_size % kTokensPerWord; // the number of tokens in the last word; 0: all
  const auto last = rest == 0 ? kAllTokens : static_cast<int32_t>((uint32_t{1} << rest) - 1);
  const auto is_not_empty = [](int32_t word) { return word != 0; };
  return std::any_of(mask.begin(), mask.end() - 1, is_not_empty) || (mask.back() & last) != 0;
}

} // namespace executorch_mlx::engine
