#include "host_sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <vector>

#include "sampling/host.h"
//
#include "sampling/definition.inc"
#include "token_mask.h"

namespace executorch_mlx::engine {

namespace {

using namespace executorch_mlx_sample; // sampling/definition.inc

constexpr float kInfinity = std::numeric_limits<float>::infinity();

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
float largest_kept_drop(const std::vector<float>& drops, const Parameters& p) {
  const auto count = static_cast<int64_t>(drops.size());
  int64_t last = count; // the rank of the last token that is kept, or `count` if all tokens are kept
  if (p.top_p < 1) {
    std::vector<float> weights(drops.size());
    std::transform(
        drops.begin(), drops.end(), weights.begin(), [&](float d) { return relative_probability(d, p.temperature); });
    // Adds the smallest weights first, because this is more accurate than the other order.
    const double total = std::accumulate(weights.rbegin(), weights.rend(), 0.0);
    const double target = static_cast<double>(p.top_p) * total;
    double sum = 0;
    for (last = 0; last < count; ++last) {
      sum += weights[last];
      if (sum >= target) {
        break;
      }
    }
  }
  if (p.top_k > 0) {
    last = std::min(last, static_cast<int64_t>(p.top_k) - 1);
  }
  return last < count ? drops[last] : kInfinity;
}

// The draw with filters: top_p, top_k and min_p.
int64_t draw_filtered(std::span<const float> logits, const Parameters& p, float max_logit) {
  const auto drop_of = [&](int64_t token) { return max_logit - logits[token]; };
  std::vector<int64_t> tokens(logits.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  std::stable_sort(tokens.begin(), tokens.end(), [&](int64_t a, int64_t b) { return drop_of(a) < drop_of(b); });
  std::vector<float> drops(tokens.size());
  std::transform(tokens.begin(), tokens.end(), drops.begin(), drop_of);
  const float max_drop = largest_kept_drop(drops, p);
  const float max_scaled_drop = p.min_p > 0 ? -std::log(std::min(p.min_p, 1.0f)) : kInfinity;
  const int64_t rank = argmin(std::ssize(drops), [&](int64_t i) {
    const bool is_kept = drops[i] <= max_drop && drops[i] / p.temperature <= max_scaled_drop;
    return is_kept ? cost_of(drops[i], p.temperature, word_of_rank(p, static_cast<uint32_t>(i))) : kInfinity;
  });
  return tokens[rank];
}

} // namespace

int64_t draw_on_host(const HostDraw& draw, const SamplingParameters& sampling) {
  process_logits(draw, sampling);
  const auto& logits = draw.logits;
  const auto count = static_cast<uint32_t>(logits.size());
  const int64_t best = argmin(count, [&](int64_t token) { return -logits[token]; });
  const Parameters p = make_parameters(sampling.temperature, sampling.top_p, draw.seed, sampling.top_k, sampling.min_p,
      /*alone=*/true, /*row=*/0, /*rows=*/1, count);
  if (is_greedy(p)) {
    return best;
  }
  std::transform(logits.begin(), logits.end(), logits.begin(), clean);
  const float max_logit = std::max(logits[best], -kLargest);
  if (has_filter(p)) {
    return draw_filtered(logits, p, max_logit);
  }
  return argmin(count, [&](int64_t token) {
    return cost_of(max_logit - logits[token], p.temperature, word_of_token(p, static_cast<uint32_t>(token)));
  });
}

std::vector<float> log_probabilities(std::span<const float> logits, std::span<const int64_t> tokens) {
  float largest = -kLargest;
  for (const float logit : logits) {
    largest = std::max(largest, clean(logit));
  }
  double sum = 0;
  for (const float logit : logits) {
    sum += std::exp(clean(logit) - largest);
  }
  const auto log_sum = static_cast<float>(std::log(sum));
  std::vector<float> result;
  for (const int64_t token : tokens) {
    const float logit = clean(logits[token]);
    result.push_back(logit == -kInfinity ? -kInfinity : logit - largest - log_sum);
  }
  return result;
}

std::vector<int64_t> most_likely(std::span<const float> logits, int64_t count) {
  std::vector<int64_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  const auto end = ids.begin() + std::min<int64_t>(count, static_cast<int64_t>(ids.size()));
  std::partial_sort(ids.begin(), end, ids.end(), [&](int64_t a, int64_t b) {
    const float of_a = clean(logits[a]), of_b = clean(logits[b]);
    return of_a > of_b || (of_a == of_b && a < b);
  });
  ids.erase(end, ids.end());
  return ids;
}

} // namespace executorch_mlx::engine
