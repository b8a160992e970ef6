// The mask of allowed tokens: see cpu_kernels.h.
#include <algorithm>
#include <cstring>
#include <limits>

#include "ops/cpu/cpu_kernels.h"
#include "ops/cpu/primitive.h"

namespace executorch_mlx::cpu {

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

} // namespace

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

} // namespace executorch_mlx::cpu
