#include "host_sampler.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "token_mask.h"

namespace executorch_mlx::engine {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr float kBelowOne = 1 - 0x1p-24f; // the largest float below 1
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kMinTemperature = 1e-30f;
constexpr float kMaxTemperature = 1e30f;

// With a filter, the noise of a token depends on the rank of the token and not on its id. As in the program
// (custom_kernel_ops/sampling/noise.py), the ranks are divided into three parts, so that a program with few candidates
// computes the noise of the first parts only. Part i begins at rank kNoiseParts[i] and uses the seed
// `seed ^ (i * kNoiseKey)`.
constexpr int64_t kNoiseParts[] = {0, 256, 2048};
constexpr uint64_t kNoiseKey = 0x278DDE6D;

// Returns the two random words that Threefry-2x32 with 20 rounds computes from a seed and the counters x0 and x1
// (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).
std::array<uint32_t, 2> threefry(uint64_t seed, uint32_t x0, uint32_t x1) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const auto high = static_cast<uint32_t>(seed >> 32);
  const auto low = static_cast<uint32_t>(seed);
  const uint32_t keys[3] = {high, low, high ^ low ^ 0x1BD11BDA};
  x0 += keys[0];
  x1 += keys[1];
  for (uint32_t group = 0; group < 5; ++group) {
    for (const int distance : kRotations[group % 2]) {
      x0 += x1;
      x1 = std::rotl(x1, distance) ^ x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + group + 1;
  }
  return {x0, x1};
}

// Returns word `i` of the `count` words that mlx::core::random::bits returns for random::key(seed). The counters are
// 0 ... count - 1. Threefry takes them in pairs: each counter of the first half with the corresponding one of the
// second half.
uint32_t random_word(uint64_t seed, int64_t i, int64_t count) {
  const int64_t half = (count + 1) / 2;
  const int64_t first = i < half ? i : i - half;
  const bool has_partner = half + first < count;
  const auto pair = threefry(seed, static_cast<uint32_t>(first), has_partner ? static_cast<uint32_t>(half + first) : 0);
  return pair[i < half ? 0 : 1];
}

// Returns a logit that is no NaN, so that its token is never drawn.
float number(float logit) { return std::isnan(logit) ? -kInfinity : logit; }

// Returns a logit that is not NaN and not +inf, so that differences are numbers.
float comparable(float logit) { return std::min(number(logit), kLargest); }

// Makes a Gumbel-distributed value from a random word, and returns the negative of this value.
float negative_gumbel(uint32_t word) {
  const float uniform = std::min(static_cast<float>(word) * 0x1p-32f, kBelowOne);
  return std::min(std::log(-std::log(uniform)), kLargest);
}

// Returns the negative of the noise for the token with this rank. The most likely of the `count` tokens has rank 0.
float negative_noise_of_rank(const HostDraw& draw, int64_t rank, int64_t count) {
  const size_t part = rank < kNoiseParts[1] ? 0 : rank < kNoiseParts[2] ? 1 : 2;
  const int64_t begin = kNoiseParts[part];
  // As in the program, the last part has at least one word.
  const int64_t end = part < 2 ? kNoiseParts[part + 1] : std::max(count, kNoiseParts[2] + 1);
  const uint64_t seed = static_cast<uint64_t>(draw.seed) ^ (part * kNoiseKey);
  return negative_gumbel(random_word(seed, rank - begin, end - begin));
}

// Returns exp(-drop / temperature): the probability of a token, divided by the probability of the most likely token.
// The drop of a token is the largest logit minus the logit of the token.
float relative_probability(float drop, float temperature) { return std::pow(2.0f, drop * (-kLog2E / temperature)); }

// Returns the index in [0, count) with the lowest cost; the first one if there are several.
template <typename Cost>
int64_t argmin(int64_t count, Cost&& cost) {
  int64_t best = 0;
  float lowest = cost(0);
  for (int64_t i = 1; i < count; ++i) {
    if (const float c = cost(i); c < lowest) {
      best = i;
      lowest = c;
    }
  }
  return best;
}

// Applies the penalties, in place, to the logits of the tokens in `history`.
void penalize(std::span<float> logits, std::span<const int64_t> history, const SamplingParameters& sampling) {
  std::map<int64_t, int64_t> occurrences;
  for (const int64_t token : history) {
    ++occurrences[token];
  }
  for (const auto& [token, count] : occurrences) {
    if (token < 0 || token >= static_cast<int64_t>(logits.size())) {
      continue;
    }
    float& logit = logits[token];
    logit = logit > 0 ? logit / sampling.repetition_penalty : logit * sampling.repetition_penalty;
    logit -= sampling.presence_penalty;
    logit -= sampling.frequency_penalty * static_cast<float>(count);
  }
}

// Applies the logits processors in place: penalties, bias and allowed tokens.
void process_logits(const HostDraw& draw, const SamplingParameters& sampling) {
  const auto logits = draw.logits;
  if (sampling.repetition_penalty != 1 || sampling.presence_penalty != 0 || sampling.frequency_penalty != 0) {
    penalize(logits, draw.history, sampling);
  }
  for (const auto& [token, value] : sampling.logit_bias) {
    logits[token] += value;
  }
  for (size_t v = 0; v < logits.size(); ++v) {
    const bool may_be_drawn = draw.allowed_tokens.empty() || is_allowed(draw.allowed_tokens, static_cast<int64_t>(v));
    logits[v] = may_be_drawn ? number(logits[v]) : -kInfinity;
  }
}

// Returns the largest drop of a token that top_p and top_k keep, or infinity if they keep all tokens. drops[i] is the
// drop of the token with rank i, so that `drops` are in ascending order.
float largest_kept_drop(const std::vector<float>& drops, const SamplingParameters& sampling, float temperature) {
  const auto count = static_cast<int64_t>(drops.size());
  int64_t last = count; // the rank of the last token that is kept, or `count` if all tokens are kept
  if (sampling.top_p < 1) {
    std::vector<float> weights(drops.size());
    std::transform(
        drops.begin(), drops.end(), weights.begin(), [&](float d) { return relative_probability(d, temperature); });
    // Adds the smallest weights first, because this is more accurate than the other order.
    const double total = std::accumulate(weights.rbegin(), weights.rend(), 0.0);
    const double target = static_cast<double>(sampling.top_p) * total;
    double sum = 0;
    for (last = 0; last < count; ++last) {
      sum += weights[last];
      if (sum >= target) {
        break;
      }
    }
  }
  if (sampling.top_k > 0) {
    last = std::min(last, sampling.top_k - 1);
  }
  return last < count ? drops[last] : kInfinity;
}

// The draw with filters: top_p, top_k and min_p.
int64_t draw_filtered(const HostDraw& draw, const SamplingParameters& sampling, float max_logit, float temperature) {
  const auto count = static_cast<int64_t>(draw.logits.size());
  const auto drop_of = [&](int64_t token) { return max_logit - draw.logits[token]; };
  std::vector<int64_t> tokens(draw.logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) { return drop_of(a) < drop_of(b); });
  std::vector<float> drops(tokens.size());
  std::transform(tokens.begin(), tokens.end(), drops.begin(), drop_of);
  const float max_drop = largest_kept_drop(drops, sampling, temperature);
  const float max_scaled_drop = sampling.min_p > 0 ? -std::log(std::min(sampling.min_p, 1.0f)) : kInfinity;
  const int64_t rank = argmin(count, [&](int64_t i) {
    const float scaled_drop = drops[i] / temperature;
    const bool is_kept = drops[i] <= max_drop && scaled_drop <= max_scaled_drop;
    return is_kept ? scaled_drop + negative_noise_of_rank(draw, i, count) : kInfinity;
  });
  return tokens[rank];
}

} // namespace

int64_t draw_on_host(const HostDraw& draw, const SamplingParameters& sampling) {
  process_logits(draw, sampling);
  const auto count = static_cast<int64_t>(draw.logits.size());
  const auto& logits = draw.logits;
  const int64_t best = argmin(count, [&](int64_t token) { return -logits[token]; });
  if (!(sampling.temperature > 0)) { // also true for NaN
    return best;
  }
  const float temperature = std::clamp(sampling.temperature, kMinTemperature, kMaxTemperature);
  std::transform(logits.begin(), logits.end(), logits.begin(), comparable);
  const float max_logit = std::max(logits[best], -kLargest);
  const bool has_filters = sampling.top_p < 1 || (sampling.top_k > 0 && sampling.top_k < count) || sampling.min_p > 0;
  if (has_filters) {
    return draw_filtered(draw, sampling, max_logit, temperature);
  }
  return argmin(count, [&](int64_t token) {
    const uint32_t word = random_word(static_cast<uint64_t>(draw.seed), token, count);
    return (max_logit - logits[token]) / temperature + negative_gumbel(word);
  });
}

std::vector<float> log_probabilities(std::span<const float> logits, std::span<const int64_t> tokens) {
  float largest = -kLargest;
  for (const float logit : logits) {
    largest = std::max(largest, comparable(logit));
  }
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp(comparable(logit) - largest);
  }
  const auto log_sum = static_cast<float>(std::log(sum));
  std::vector<float> result;
  for (const int64_t token : tokens) {
    const float logit = comparable(logits[token]);
    result.push_back(logit == -kInfinity ? -kInfinity : logit - largest - log_sum);
  }
  return result;
}

std::vector<int64_t> most_likely(std::span<const float> logits, int64_t count) {
  std::vector<int64_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto end = ids.begin() + std::min<int64_t>(count, static_cast<int64_t>(ids.size()));
  std::partial_sort(ids.begin(), end, ids.end(), [&](int64_t a, int64_t b) {
    const float of_a = comparable(logits[a]), of_b = comparable(logits[b]);
    return of_a > of_b || (of_a == of_b && a < b);
  });
  ids.erase(end, ids.end());
  return ids;
}

} // namespace executorch_mlx::engine
