// The sampler: draws a token from each row of logits. sampling/definition.inc defines which one. The passes over the
// vocabulary are in simd/sampling.h; this file chooses among the few tokens that can win.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../sampling/host.h"
//
#include "../sampling/definition.inc"
#include "pool.h"
#include "sample.h"
#include "simd/kernels.h"

namespace executorch_mlx {

namespace {

using namespace executorch_mlx_sample; // definition.inc

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLargestNoise = 16.7; // the largest noise, rounded up

// The logits of a row, as widen_logits() returns them.
class Logits {
 public:
  Logits(const void* x, FloatType type, int64_t count) : count_(count), y_(count), maxima_(num_blocks()) {
    kernels().widen_logits(x, type, count, y_.data(), maxima_.data());
    maximum_ = *std::max_element(maxima_.begin(), maxima_.end());
  }

  int64_t argmax() const {
    for (int64_t block = 0; block < num_blocks(); ++block) {
      if (maxima_[block] == maximum_) {
        const float* begin = y_.data() + block * kLogitBlock;
        return std::find(begin, y_.data() + end_of(block), maximum_) - y_.data();
      }
    }
    return 0;
  }

  // Replaces plus infinity by the largest number, and makes the maximum finite.
  void make_finite() {
    if (maximum_ == kInfinity) {
      for (auto* list : {&y_, &maxima_}) {
        for (float& v : *list) {
          v = std::min(v, kLargest);
        }
      }
    }
    maximum_ = std::clamp(maximum_, -kLargest, kLargest);
  }

  int64_t count() const { return count_; }
  float drop_of(int64_t token) const { return maximum_ - y_[token]; }
  float maximum() const { return maximum_; }
  const float* data() const { return y_.data(); }

  // A lower bound of the drops of the tokens [begin, end): the smallest drop in the blocks that contain them.
  float smallest_drop(int64_t begin, int64_t end) const {
    const auto first = maxima_.begin() + begin / kLogitBlock;
    const auto last = maxima_.begin() + (end + kLogitBlock - 1) / kLogitBlock;
    return maximum_ - *std::max_element(first, last);
  }

  // A lower bound of the logits of the `count` most likely tokens: the maxima of `count` blocks are at least this
  // large. Minus infinity if there are fewer blocks.
  float reached_by(int64_t count) const {
    if (count > num_blocks()) {
      return -kInfinity;
    }
    std::vector<float> maxima = maxima_;
    std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<>());
    return maxima[count - 1];
  }

  // Calls visit(token) for the tokens with logits of at least `lowest`, in ascending order.
  template <typename Visit>
  void for_each_above(float lowest, Visit&& visit) const {
    for (int64_t block = 0; block < num_blocks(); ++block) {
      for (int64_t i = block * kLogitBlock; maxima_[block] >= lowest && i < end_of(block); ++i) {
        if (y_[i] >= lowest) {
          visit(i);
        }
      }
    }
  }

 private:
  int64_t num_blocks() const { return (count_ + kLogitBlock - 1) / kLogitBlock; }
  int64_t end_of(int64_t block) const { return std::min<int64_t>((block + 1) * kLogitBlock, count_); }

  int64_t count_;
  std::vector<float> y_;
  std::vector<float> maxima_; // of blocks of kLogitBlock tokens
  float maximum_;
};

// The index with the lowest cost so far. If several indices have this cost, the lowest of them. An index is a token, or
// a rank in draw_filtered(). If every cost is infinite, the index is 0.
struct Winner {
  float cost = kInfinity;
  int64_t index = 0;

  void consider(float new_cost, int64_t new_index) {
    if (new_cost < cost || (new_cost == cost && new_index < index)) {
      cost = new_cost;
      index = new_index;
    }
  }
};

// A lower bound of the random words that give a noise of `gumbel` or more.
uint32_t lowest_word(double gumbel) {
  const double below_one = -std::expm1(-std::exp(-gumbel)); // 1 - exp(-exp(-gumbel))
  const double uniform = 1 - below_one * (1 + 1e-4) - 0x1p-22;
  return uniform > 0 ? static_cast<uint32_t>(uniform * 0x1p32) : 0;
}

int64_t draw_unfiltered(const Logits& logits, const Parameters& p) {
  const int64_t count = logits.count();
  const uint64_t total = static_cast<uint64_t>(p.rows) * count;
  const uint64_t half = (total + 1) / 2;
  const uint64_t row_begin = static_cast<uint64_t>(p.row) * count;
  Winner winner;
  const auto consider = [&](int64_t token, uint32_t word) {
    winner.consider(cost_of(logits.drop_of(token), p.temperature, word), token);
  };
  const int64_t most_likely = logits.argmax();
  consider(most_likely, word_of_token(p, static_cast<uint32_t>(most_likely)));

  // Considers those of the tokens [begin, end) that can win. `words` are the random words of these tokens.
  const auto consider_all = [&](int64_t begin, int64_t end, const uint32_t* words) {
    const double needed = double{logits.smallest_drop(begin, end)} / p.temperature - winner.cost;
    if (needed > kLargestNoise) {
      return;
    }
    const uint32_t lowest = lowest_word(needed);
    uint32_t highest = 0;
    for (int64_t i = 0; i < end - begin; ++i) {
      highest = std::max(highest, words[i]);
    }
    for (int64_t i = 0; highest >= lowest && i < end - begin; ++i) {
      if (words[i] >= lowest) {
        consider(begin + i, words[i]);
      }
    }
  };
  // The rows share one sequence of `total` random words. A call of random_words() gives two ranges of it, one from
  // `begin` and one from `half + begin` on. consider_part() considers the tokens of this row whose words are in a
  // range.
  uint32_t low[kLogitBlock], high[kLogitBlock];
  const auto consider_part = [&](uint64_t begin, uint64_t size, const uint32_t* words) {
    const uint64_t first = std::max(begin, row_begin);
    const uint64_t last = std::min({begin + size, row_begin + count, total});
    if (first < last) {
      consider_all(
          static_cast<int64_t>(first - row_begin), static_cast<int64_t>(last - row_begin), words + (first - begin));
    }
  };
  for (uint64_t begin = 0; begin < half; begin += kLogitBlock) {
    const uint64_t size = std::min<uint64_t>(kLogitBlock, half - begin);
    const auto is_needed = [&](uint64_t from) { return from < row_begin + count && from + size > row_begin; };
    if (!is_needed(begin) && !is_needed(half + begin)) {
      continue;
    }
    kernels().random_words(static_cast<uint32_t>(p.seed >> 32), static_cast<uint32_t>(p.seed),
        static_cast<uint32_t>(begin), static_cast<uint32_t>(half + begin), static_cast<ptrdiff_t>(size), low, high);
    if (half + begin + size > total) { // `total` is odd: the second range is one word shorter
      low[size - 1] = random_word(p.seed, half - 1, total);
    }
    consider_part(begin, size, low);
    consider_part(half + begin, size, high);
  }
  return winner.index;
}

struct Candidate {
  float drop;
  int32_t token;
};

// Sorts by drop, and equal drops by token. Expects the candidates in ascending order of their tokens, because the radix
// sort keeps the order of equal drops.
void sort_by_drop(std::vector<Candidate>& candidates) {
  const auto is_before = [](const Candidate& a, const Candidate& b) {
    return a.drop < b.drop || (a.drop == b.drop && a.token < b.token);
  };
  if (candidates.size() < 4096) {
    std::sort(candidates.begin(), candidates.end(), is_before);
    return;
  }
  // A radix sort of the bits of the drops, which are not negative but for -0: it counts as 0.
  constexpr int kBits = 11;
  std::vector<Candidate> sorted(candidates.size());
  for (int shift = 0; shift < 32; shift += kBits) {
    const auto digit = [shift](const Candidate& c) {
      uint32_t bits;
      std::memcpy(&bits, &c.drop, sizeof(bits));
      return (bits & 0x7FFFFFFF) >> shift & ((1u << kBits) - 1);
    };
    uint32_t begins[(1 << kBits) + 1] = {};
    for (const Candidate& c : candidates) {
      ++begins[digit(c) + 1];
    }
    for (int i = 0; i < 1 << kBits; ++i) {
      begins[i + 1] += begins[i];
    }
    for (const Candidate& c : candidates) {
      sorted[begins[digit(c)]++] = c;
    }
    candidates.swap(sorted);
  }
}

// The largest drop that top_p and top_k keep, or infinity if it is not among the candidates.
float largest_kept_drop(
    const std::vector<Candidate>& candidates, double nucleus_weight, float scale, const Parameters& p) {
  const auto size = static_cast<int64_t>(candidates.size());
  int64_t rank = size;
  if (p.top_k > 0) {
    rank = std::min(rank, static_cast<int64_t>(p.top_k) - 1);
  }
  if (p.top_p < 1) {
    double weight = 0;
    for (int64_t i = 0; i < rank; ++i) {
      weight += std::exp2(candidates[i].drop * scale);
      if (!(weight < nucleus_weight)) {
        rank = i;
      }
    }
  }
  return rank < size ? candidates[rank].drop : kInfinity;
}

int64_t draw_filtered(const Logits& logits, const Parameters& p) {
  const float temperature = p.temperature;
  const int64_t count = logits.count();
  const float scale = -kLog2E / temperature;
  const double nucleus_weight =
      p.top_p < 1 ? p.top_p * kernels().sum_probability_weights(logits.data(), count, logits.maximum(), scale) : 0;
  const float largest_scaled_drop = p.min_p > 0 ? -std::log(std::min(p.min_p, 1.0f)) : kInfinity;

  // The candidates are the tokens whose drop is at most `guess`. If the filters may keep another token, the guess is
  // doubled.
  constexpr double kMargin = 1 + 1e-5;
  constexpr double kFirstGuess = 6; // of drop / temperature: the tokens up to it often have 90% of the probability
  double guess = p.top_p < 1 ? kFirstGuess * temperature : kInfinity;
  if (p.min_p > 0) {
    guess = std::min(guess, largest_scaled_drop * kMargin * temperature);
  }
  if (p.top_k > 0) {
    const double reached = logits.reached_by(static_cast<int64_t>(p.top_k));
    const double margin = (std::abs(reached) + std::abs(logits.maximum())) * 1e-6;
    guess = std::min(guess, logits.maximum() - reached + margin);
  }
  guess = std::max(guess, std::abs(logits.maximum()) * 1e-6 + 1e-30); // more than the rounding of a difference
  std::vector<Candidate> candidates;
  float limit = 0;
  for (bool is_sure = false; !is_sure; guess *= 2) {
    const auto lowest = static_cast<float>(logits.maximum() - guess);
    candidates.clear();
    logits.for_each_above(
        lowest, [&](int64_t token) { candidates.push_back({logits.drop_of(token), static_cast<int32_t>(token)}); });
    sort_by_drop(candidates);
    limit = largest_kept_drop(candidates, nucleus_weight, scale, p);
    const float other_drop = logits.maximum() - lowest; // no other token has a smaller drop
    is_sure = static_cast<int64_t>(candidates.size()) == count || limit < other_drop ||
        other_drop / temperature > largest_scaled_drop;
  }

  Winner winner;
  for (int64_t rank = 0; rank < static_cast<int64_t>(candidates.size()); ++rank) {
    const float drop = candidates[rank].drop;
    const float scaled_drop = drop / temperature;
    if (drop > limit || scaled_drop > largest_scaled_drop || scaled_drop - kLargestNoise > winner.cost) {
      break;
    }
    winner.consider(cost_of(drop, temperature, word_of_rank(p, static_cast<uint32_t>(rank))), rank);
  }
  return candidates[winner.index].token;
}

int64_t draw(const kernel::Sample& s, const void* row, const Parameters& p) {
  Logits logits(row, s.type, s.vocabulary);
  if (is_greedy(p)) {
    return logits.argmax();
  }
  logits.make_finite();
  return has_filter(p) ? draw_filtered(logits, p) : draw_unfiltered(logits, p);
}

} // namespace

void kernel::sample(const Sample& s) {
  const auto at = [](const auto& values, int64_t row) { return values.data[values.per_row ? row : 0]; };
  const size_t row_bytes = static_cast<size_t>(s.vocabulary) * (s.type == FloatType::float32 ? 4 : 2);
  const auto run = [&](int64_t row) {
    // If a parameter has a value for each row, each row has its own random words, as if it were the only row.
    const bool draws_alone =
        s.temperature.per_row || s.top_p.per_row || s.seed.per_row || s.top_k.per_row || s.min_p.per_row;
    const Parameters parameters = make_parameters(at(s.temperature, row), at(s.top_p, row), at(s.seed, row),
        s.top_k.data ? at(s.top_k, row) : 0, s.min_p.data ? at(s.min_p, row) : 0, draws_alone,
        static_cast<uint32_t>(row), static_cast<uint32_t>(s.rows), static_cast<uint32_t>(s.vocabulary));
    s.tokens[row] = draw(s, static_cast<const char*>(s.logits) + row * row_bytes, parameters);
  };
  if (s.rows == 1) {
    return run(0);
  }
  parallel(static_cast<int>(s.rows), run);
}

} // namespace executorch_mlx
