#include "chunk_times.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace executorch_mlx::engine {

namespace {

constexpr size_t kRecent = 12; // number of chunks that determine the growth

// The position where a token is assumed to take twice as long as the first one, until the growth is measured.
constexpr double kAssumedDouble = 8192;

} // namespace

// The median of the slopes between all pairs of chunks (Theil and Sen): a few slow chunks do not change it. A small
// chunk takes longer for each token, so it is not compared with a large one.
double ChunkTimes::measured_growth() const {
  std::vector<double> slopes;
  for (const auto& a : recent_) {
    for (const auto& b : recent_) {
      const double distance = b.position - a.position;
      if (distance >= kMinChunk && std::max(a.tokens, b.tokens) <= 2 * std::min(a.tokens, b.tokens)) {
        slopes.push_back((b.token_seconds - a.token_seconds) / distance);
      }
    }
  }
  if (slopes.empty()) {
    const Measurement& last = recent_.back();
    return last.token_seconds / (kAssumedDouble + last.position);
  }
  const auto middle = slopes.begin() + static_cast<std::ptrdiff_t>(slopes.size() / 2);
  std::nth_element(slopes.begin(), middle, slopes.end());
  return std::max(*middle, 0.0);
}

void ChunkTimes::record(int64_t position, int64_t tokens, double seconds) {
  if (tokens < kMinChunk) {
    return;
  }
  const auto count = static_cast<double>(tokens);
  const Measurement measured = {count, static_cast<double>(position) + count / 2, seconds / count};
  const double weight = recent_.empty() ? 0 : recent_.back().tokens;
  recent_.push_back(measured);
  if (recent_.size() > kRecent) {
    recent_.pop_front();
  }
  const double old_growth = growth_;
  growth_ = measured_growth();

  // The expected time rises at once and falls step by step: after one fast chunk, the next must not be too large. The
  // expectation so far counts as much as the tokens of the chunk before.
  const double expected = base_ + old_growth * measured.position - growth_ * measured.position;
  const double now = measured.token_seconds - growth_ * measured.position;
  base_ = std::max(now, (weight * expected + count * now) / (weight + count));
}

int64_t ChunkTimes::next_size(int64_t position, int64_t rest, int64_t limit, double seconds) const {
  const auto begin = static_cast<double>(position);
  const double nearest = begin - static_cast<double>(limit);
  const auto is_near = [nearest](const Measurement& measured) { return measured.position >= nearest; };
  if (std::none_of(recent_.begin(), recent_.end(), is_near)) {
    return std::min({kMinChunk, rest, limit});
  }
  // n tokens take n * (first + growth / 2 * n) seconds.
  const double first = std::max(base_ + growth_ * begin, 1e-9);
  const double slope = growth_ / 2;
  const auto all = static_cast<double>(rest);
  const double total = all * (first + slope * all);
  const double each = total / std::max(std::ceil(total / seconds), 1.0);
  // The solution of n * (first + slope * n) = each, in a form that allows slope = 0.
  const double size = 2 * each / (first + std::sqrt(first * first + 4 * slope * each));
  const auto whole = static_cast<int64_t>(std::ceil(std::min(size, all)));
  return std::min({std::max(whole, kMinChunk), rest, limit});
}

} // namespace executorch_mlx::engine
