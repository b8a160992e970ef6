// Masks of tokens: bit t % 32 of word t / 32 says whether token t may be drawn.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace executorch_mlx {

constexpr int64_t kTokensPerWord = 32;
constexpr int32_t kAllTokens = -1; // a word that allows all of its tokens

// The number of words for a vocabulary.
constexpr size_t mask_words(int64_t vocab_size) {
  return static_cast<size_t>((vocab_size + kTokensPerWord - 1) / kTokensPerWord);
}

constexpr int32_t mask_bit(int64_t token) {
  return static_cast<int32_t>(uint32_t{1} << (token % kTokensPerWord));
}

inline bool is_allowed(std::span<const int32_t> mask, int64_t token) {
  return (mask[token / kTokensPerWord] & mask_bit(token)) != 0;
}

inline void allow(std::span<int32_t> mask, int64_t token) {
  mask[token / kTokensPerWord] |= mask_bit(token);
}

inline void forbid(std::span<int32_t> mask, int64_t token) {
  mask[token / kTokensPerWord] &= ~mask_bit(token);
}

} // namespace executorch_mlx
