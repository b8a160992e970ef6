#include "call/kv_cache.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "checks.h"

namespace executorch_mlx {

namespace {

constexpr uint32_t kMinCapacity = 64;
constexpr int kPositionAxis = 2;

// Whether `cache` has a value, and its dtype and shape equal those of x, apart from the number of positions.
bool matches(const std::optional<mx::array>& cache, const mx::array& x) {
  if (!cache || cache->dtype() != x.dtype()) {
    return false;
  }
  auto shape = cache->shape();
  shape[kPositionAxis] = x.shape(kPositionAxis);
  return shape == x.shape();
}

// x[:, :, start:stop]
mx::array slice_positions(const mx::array& x, int start, int stop, mx::Stream stream) {
  mx::Shape from(4, 0);
  from[kPositionAxis] = start;
  mx::Shape to = x.shape();
  to[kPositionAxis] = stop;
  return mx::slice(x, from, to, stream);
}

// If `cache` has room for fewer than `needed` positions, replaces it by a larger one, of at most `limit` positions.
// Copies its first `kept` positions, and fills all later positions with zeros. The dtype and the other sizes are those
// of `like`.
void grow(std::optional<mx::array>& cache, const mx::array& like, int kept, int needed, int limit, mx::Stream stream) {
  if (cache && cache->shape(kPositionAxis) >= needed) {
    return;
  }
  mx::Shape shape = like.shape();
  const auto capacity = std::bit_ceil(std::max(static_cast<uint32_t>(needed), kMinCapacity));
  shape[kPositionAxis] = static_cast<int>(std::min(capacity, static_cast<uint32_t>(limit)));
  check_size(shape, like.dtype());
  const auto zeros = mx::zeros(shape, like.dtype(), stream);
  if (kept == 0) {
    cache = zeros;
    return;
  }
  mx::Shape stop = cache->shape();
  stop[kPositionAxis] = kept;
  cache = mx::slice_update(zeros, slice_positions(*cache, 0, kept, stream), mx::Shape(4, 0), stop, stream);
}

// Writes x to the indices of the cache from `start` on. The array is moved out of `cache` first: MLX updates an array
// in place only if there is no other reference to it.
void write(std::optional<mx::array>& cache, const mx::array& x, int start, mx::Stream stream) {
  mx::Shape from(4, 0);
  from[kPositionAxis] = start;
  mx::Shape to = x.shape();
  to[kPositionAxis] = start + x.shape(kPositionAxis);
  const mx::array before = std::move(*cache);
  cache = mx::slice_update(before, x, from, to, stream);
}

// Writes x to the indices of a ring buffer from `start` on. Tokens that do not fit before the end of the buffer go to
// its beginning.
void write_to_ring(std::optional<mx::array>& cache, const mx::array& x, int start, mx::Stream stream) {
  const int tokens = x.shape(kPositionAxis);
  const int before_end = std::min(tokens, cache->shape(kPositionAxis) - start);
  write(cache, slice_positions(x, 0, before_end, stream), start, stream);
  if (before_end < tokens) {
    write(cache, slice_positions(x, before_end, tokens, stream), 0, stream);
  }
}

// Returns the last `count` positions before position `stop` of a ring buffer, in ascending order, followed by x.
mx::array unroll(const mx::array& ring, int stop, int count, const mx::array& x, mx::Stream stream) {
  const int window = ring.shape(kPositionAxis);
  const int end = stop % window;
  std::vector<mx::array> parts;
  if (count > end) {
    parts.push_back(slice_positions(ring, window - (count - end), window, stream));
  }
  if (end > 0 && count > 0) {
    parts.push_back(slice_positions(ring, std::max(0, end - count), end, stream));
  }
  parts.push_back(x);
  return mx::concatenate(std::move(parts), kPositionAxis, stream);
}

// Returns a bool mask [tokens, offset + tokens]. Query i and key `offset + i` belong to the same token. The query
// attends to this key and to the `window - 1` keys before it.
mx::array sliding_window_mask(int tokens, int offset, int window, mx::Stream stream) {
  const auto query = mx::arange(offset, offset + tokens, mx::int32, stream);
  const auto key = mx::arange(0, offset + tokens, mx::int32, stream);
  const auto distance = mx::subtract(mx::expand_dims(query, 1, stream), key, stream);
  const auto is_past = mx::greater_equal(distance, mx::array(0), stream);
  return mx::logical_and(is_past, mx::less(distance, mx::array(window), stream), stream);
}

} // namespace

void KvLayer::check(const mx::array& k, const mx::array& v, int start) const {
  check_argument(start <= length_, "position: got ", start, ", expected at most ", length_, ": the cache holds ",
      length_, " positions");
  check_argument(window_ == 0 || start == 0 || length_ <= window_ || start >= length_ - 1, "position: got ", start,
      ", expected 0 or at least ", length_ - 1, ": the ring buffer holds the last ", window_, " of ", length_,
      " positions");
  check_argument(start == 0 || (matches(keys, k) && matches(values, v)), "got k ", describe(k), " and v ", describe(v),
      ", expected the shape and dtype of the cache, ", describe(keys.value_or(k)), " and ",
      describe(values.value_or(v)));
  check_argument(int64_t{start} + k.shape(kPositionAxis) <= std::numeric_limits<int32_t>::max() / 2,
      "position: ", start, " exceeds the limit of a cache");
}

AttentionInputs KvLayer::append(const mx::array& k, const mx::array& v, int start, mx::Stream stream) {
  check(k, v, start);
  if (!matches(keys, k) || !matches(values, v)) {
    *this = KvLayer(window_);
  }
  const int end = start + k.shape(kPositionAxis);
  AttentionInputs inputs =
      window_ == 0 || end <= window_ ? append_linear(k, v, start, stream) : append_to_ring(k, v, start, stream);
  length_ = end;
  return inputs;
}

// For a linear cache, and for a ring buffer that has not wrapped around.
AttentionInputs KvLayer::append_linear(const mx::array& k, const mx::array& v, int start, mx::Stream stream) {
  const int tokens = k.shape(kPositionAxis);
  const int end = start + tokens;
  const int limit = window_ == 0 ? std::numeric_limits<int>::max() : window_;
  const auto append = [&](std::optional<mx::array>& cache, const mx::array& x) {
    grow(cache, x, start, end, limit, stream);
    write(cache, x, start, stream);
  };
  append(keys, k);
  append(values, v);
  return {slice_positions(*keys, 0, end, stream), slice_positions(*values, 0, end, stream), /*is_causal=*/true,
      std::nullopt};
}

// For a ring buffer that has wrapped around, or wraps around with this append.
AttentionInputs KvLayer::append_to_ring(const mx::array& k, const mx::array& v, int start, mx::Stream stream) {
  const int tokens = k.shape(kPositionAxis);
  const int kept = std::min(start, window_);
  for (auto* cache : {&keys, &values}) {
    grow(*cache, cache == &keys ? k : v, kept, window_, window_, stream);
  }
  if (tokens == 1) {
    // After this write, the ring buffer holds exactly the positions that the token attends to. Attention does not
    // depend on their order.
    write(keys, k, start % window_, stream);
    write(values, v, start % window_, stream);
    return {*keys, *values, /*is_causal=*/false, std::nullopt};
  }
  const int past = std::min(start, window_ - 1); // cached positions that the first query attends to
  AttentionInputs inputs = {unroll(*keys, start, past, k, stream), unroll(*values, start, past, v, stream),
      /*is_causal=*/false, sliding_window_mask(tokens, past, window_, stream)};
  const int stored = std::min(tokens, window_); // the last ones: earlier tokens would be overwritten at once
  const int first = start + tokens - stored;
  write_to_ring(keys, slice_positions(k, tokens - stored, tokens, stream), first % window_, stream);
  write_to_ring(values, slice_positions(v, tokens - stored, tokens, stream), first % window_, stream);
  return inputs;
}

} // namespace executorch_mlx
