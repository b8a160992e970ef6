#include "speculation.h"

#include <algorithm>
#include <utility>

namespace executorch_mlx::engine {

namespace {

constexpr std::array<int64_t, 8> kDraftLengths = {1, 2, 3, 5, 7, 11, 19, StepCosts::kMaxDraft};
// Speculation pays if it multiplies the tokens per second of plain steps by more than this factor.
constexpr double kMinGain = 1.03;
// After this many steps of one kind, a step of the other kind measures its time.
constexpr uint64_t kMeasureEvery = 64;
// Of so many choices, the last ones are made to measure steps of several rows. Where steps overlap, a time is known
// only after several steps of one kind.
constexpr uint64_t kMeasuringChoices = 6;
constexpr double kDecay = 0.95; // factor by which each new draft lowers the weight of all earlier drafts
// Assumed times as factors of the time of a plain step, until the times are measured.
constexpr double kDraftCost = 0.25; // of a token of a draft model
constexpr double kTokenCost = 0.1; // of one more token in a call of `verify`

uint64_t hash(std::span<const int64_t> tokens) {
  uint64_t h = 0x9E3779B97F4A7C15;
  for (const int64_t token : tokens) {
    h = (h ^ static_cast<uint64_t>(token)) * 0xD6E8FEB86659FD93;
    h ^= h >> 32;
  }
  return h;
}

} // namespace

Draft LookupDrafter::propose(std::span<const int64_t> ids, int64_t count) {
  for (; indexed_ + 1 < ids.size(); ++indexed_) {
    const auto seen = ids.first(indexed_ + 1);
    for (size_t level = 0; level < kSizes.size(); ++level) {
      if (seen.size() >= kSizes[level]) {
        levels_[level].next[hash(seen.last(kSizes[level]))] = seen.size();
      }
    }
  }
  for (size_t level = 0; level < kSizes.size() && count > 0; ++level) {
    const size_t n = kSizes[level];
    if (ids.size() <= n) {
      continue;
    }
    const auto found = levels_[level].next.find(hash(ids.last(n)));
    if (found == levels_[level].next.end()) {
      continue;
    }
    // The draft may continue into itself, as in a repetition.
    Draft draft = {.tokens = {}, .level = level};
    for (size_t i = found->second; draft.tokens.size() < static_cast<size_t>(count); ++i) {
      draft.tokens.push_back(i < ids.size() ? ids[i] : draft.tokens[i - ids.size()]);
    }
    return draft;
  }
  return {};
}

void Acceptance::learn(int64_t proposed, int64_t right) {
  accepted = kDecay * accepted + static_cast<double>(right);
  judged = kDecay * judged + static_cast<double>(std::min(right + 1, proposed));
}

// A lower time replaces the estimate, a higher one only moves it, because other work may have slowed the call down.
void record_seconds(bool& is_warm, double& cost, double seconds) {
  if (std::exchange(is_warm, true)) {
    cost = cost == 0 || seconds < cost ? seconds : 0.9 * cost + 0.1 * seconds;
  }
}

void StepCosts::record_one_row(int64_t tokens, double seconds) {
  calls_since_plain_ = tokens == 1 ? 0 : calls_since_plain_ + 1;
  record_seconds(tokens == 1 ? warm_.plain : warm_.verify, one_row_[tokens], seconds);
}

void StepCosts::record_rows(size_t width, double seconds) {
  auto& cost = rows_[width];
  record_seconds(cost.is_warm, cost.seconds, seconds);
}

void StepCosts::record_rewind(double seconds) { record_seconds(warm_.rewind, rewind_seconds_, seconds); }

double StepCosts::rows_seconds(size_t width) const {
  const auto found = rows_.find(width);
  return found == rows_.end() ? 0 : found->second.seconds;
}

bool StepCosts::prefers_single_steps(size_t count, size_t width) {
  const bool is_cheaper = one_row_[1] > 0 && one_row_[1] * static_cast<double>(count) < rows_seconds(width);
  return is_cheaper && ++choices_ % kMeasureEvery < kMeasureEvery - kMeasuringChoices;
}

// Returns the seconds of a call for one row with this many tokens: measured, or estimated from a shorter call.
double StepCosts::cost(int64_t tokens) const {
  int64_t known = tokens;
  while (known > 1 && one_row_[known] == 0) {
    --known;
  }
  return one_row_[known] + static_cast<double>(tokens - known) * kTokenCost * one_row_[1];
}

double StepCosts::assumed_draft_seconds() const { return kDraftCost * one_row_[1]; }

StepCosts::Choice StepCosts::best_draft(
    double acceptance, int64_t most, size_t running, size_t width, double draft_seconds) const {
  // Now and then, a plain step is made so that its time stays known.
  const bool is_plain_due = running == 1 && calls_since_plain_ >= kMeasureEvery;
  if (one_row_[1] == 0 || (running > 1 && rows_seconds(width) == 0) || is_plain_due) {
    return {};
  }
  // Tokens per second without speculation. A call of `verify` for one of several answers delays all others. It has to
  // gain more tokens per second than steps of several rows draw.
  const double plain = running > 1 ? static_cast<double>(running) / rows_seconds(width) : 1 / one_row_[1];
  Choice best = {.rate = kMinGain * plain};
  double expected = 1; // tokens of a call with a draft of `length` tokens
  double probability = 1;
  int64_t length = 0;
  for (const int64_t candidate : kDraftLengths) {
    for (; length < std::min(candidate, most); ++length) {
      probability *= acceptance;
      expected += probability;
    }
    const double seconds =
        cost(length + 1) + static_cast<double>(length) * draft_seconds + (1 - probability) * rewind_seconds_;
    // A step of all rows would draw one of the expected tokens without an extra call.
    const double rate = (running > 1 ? expected - 1 : expected) / seconds;
    if (length > 0 && rate > best.rate) {
      best = {.length = length, .rate = rate};
    }
  }
  return best;
}

} // namespace executorch_mlx::engine
