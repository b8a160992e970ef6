#include "kv_cache.h"

#include <bit>

#include "context.h"

namespace executorch_mlx {

namespace {

constexpr uint32_t kLeastCapacity = 64;
constexpr int kPositions = 2;  // axis

bool fits(const std::optional<mx::array>& cells, const mx::array& x) {
  if (!cells || cells->dtype() != x.dtype()) {
    return false;
  }
  auto shape = cells->shape();
  shape[kPositions] = x.shape(kPositions);
  return shape == x.shape();
}

// x[:, :, start:stop]
mx::array range(const mx::array& x, int start, int stop, mx::Stream stream) {
  mx::Shape from(4, 0);
  from[kPositions] = start;
  mx::Shape to = x.shape();
  to[kPositions] = stop;
  return mx::slice(x, from, to, stream);
}

// Makes room for `needed` cells, at most `limit` of which there will ever be; keeps
// the first `kept`.
void grow(std::optional<mx::array>& cells, const mx::array& like, int kept, int needed, int limit, mx::Stream stream) {
  if (cells && cells->shape(kPositions) >= needed) {
    return;
  }
  mx::Shape shape = like.shape();
  const auto capacity = std::bit_ceil(std::max(static_cast<uint32_t>(needed), kLeastCapacity));
  shape[kPositions] = static_cast<int>(std::min(capacity, static_cast<uint32_t>(limit)));
  Context::check_size(shape, like.dtype());
  const auto empty = mx::zeros(shape, like.dtype(), stream);
  if (kept == 0) {
    cells = empty;
    return;
  }
  mx::Shape stop = cells->shape();
  stop[kPositions] = kept;
  cells = mx::slice_update(empty, range(*cells, 0, kept, stream), mx::Shape(4, 0), stop, stream);
}

// Puts x into the cells from `start` on. Leaves `cells` the only owner of what it
// held, for the update to be in place.
void put(std::optional<mx::array>& cells, const mx::array& x, int start, mx::Stream stream) {
  mx::Shape from(4, 0);
  from[kPositions] = start;
  mx::Shape to = x.shape();
  to[kPositions] = start + x.shape(kPositions);
  const mx::array before = std::move(*cells);
  cells = mx::slice_update(before, x, from, to, stream);
}

// The same in a ring, which goes on at its first cell.
void put_around(std::optional<mx::array>& cells, const mx::array& x, int start, mx::Stream stream) {
  const int tokens = x.shape(kPositions);
  const int before_end = std::min(tokens, cells->shape(kPositions) - start);
  put(cells, range(x, 0, before_end, stream), start, stream);
  if (before_end < tokens) {
    put(cells, range(x, before_end, tokens, stream), 0, stream);
  }
}

// Cells of a ring in the order of their positions: `count` of them before `stop`, and
// then x.
mx::array unrolled(const mx::array& cells, int stop, int count, const mx::array& x, mx::Stream stream) {
  const int window = cells.shape(kPositions);
  const int end = stop % window;
  std::vector<mx::array> parts;
  if (count > end) {
    parts.push_back(range(cells, window - (count - end), window, stream));
  }
  if (end > 0 && count > 0) {
    parts.push_back(range(cells, std::max(0, end - count), end, stream));
  }
  parts.push_back(x);
  return mx::concatenate(std::move(parts), kPositions, stream);
}

// Query i stands at cell `offset + i`, and sees that one and the window - 1 before it.
mx::array band(int queries, int offset, int window, mx::Stream stream) {
  const auto query = mx::arange(offset, offset + queries, mx::int32, stream);
  const auto key = mx::arange(0, offset + queries, mx::int32, stream);
  const auto distance = mx::subtract(mx::expand_dims(query, 1, stream), key, stream);
  const auto seen = mx::greater_equal(distance, mx::array(0), stream);
  return mx::logical_and(seen, mx::less(distance, mx::array(window), stream), stream);
}

} // namespace

void KvLayer::check(const mx::array& k, const mx::array& v, int start) const {
  check_argument(
      start <= length_, "position ", start, " leaves a hole after the ", length_, " that the cache holds");
  check_argument(
      window_ == 0 || start == 0 || length_ <= window_ || start >= length_ - 1,
      "position ", start, " attends to more than the last ", window_, " of ", length_,
      " positions, which is what the ring holds: go back to position 0, or to ", length_ - 1);
  check_argument(
      start == 0 || (fits(keys, k) && fits(values, v)),
      "k is ", describe(k), ", v ", describe(v), ", the cache holds ", describe(keys.value_or(k)), " and ",
      describe(values.value_or(v)));
  check_argument(
      int64_t{start} + k.shape(kPositions) <= std::numeric_limits<int32_t>::max() / 2,
      "position ", start, " is more than a cache can hold");
}

History KvLayer::append(const mx::array& k, const mx::array& v, int start, mx::Stream stream) {
  check(k, v, start);
  if (!fits(keys, k) || !fits(values, v)) {
    *this = KvLayer(window_);
  }
  const int end = start + k.shape(kPositions);
  History history = window_ == 0 || end <= window_ ? append_in_order(k, v, start, stream)
                                                   : append_around(k, v, start, stream);
  length_ = end;
  return history;
}

History KvLayer::append_in_order(const mx::array& k, const mx::array& v, int start, mx::Stream stream) {
  const int tokens = k.shape(kPositions);
  const int end = start + tokens;
  const int limit = window_ == 0 ? std::numeric_limits<int>::max() : window_;
  const auto append = [&](std::optional<mx::array>& cells, const mx::array& x) {
    grow(cells, x, start, end, limit, stream);
    put(cells, x, start, stream);
  };
  append(keys, k);
  append(values, v);
  return {range(*keys, 0, end, stream), range(*values, 0, end, stream), tokens > 1 ? "causal" : "", std::nullopt};
}

// Some of the positions go round the end of the ring, or have before.
History KvLayer::append_around(const mx::array& k, const mx::array& v, int start, mx::Stream stream) {
  const int tokens = k.shape(kPositions);
  const int kept = std::min(start, window_);
  for (auto* cells : {&keys, &values}) {
    grow(*cells, cells == &keys ? k : v, kept, window_, window_, stream);
  }
  if (tokens == 1) {
    // The ring holds what the token sees and nothing else; the order does not matter.
    put(keys, k, start % window_, stream);
    put(values, v, start % window_, stream);
    return {*keys, *values, "", std::nullopt};
  }
  const int past = std::min(start, window_ - 1);
  History history = {
      unrolled(*keys, start, past, k, stream), unrolled(*values, start, past, v, stream), "",
      band(tokens, past, window_, stream)};
  const int last = std::min(tokens, window_);
  const int first = start + tokens - last;
  put_around(keys, range(k, tokens - last, tokens, stream), first % window_, stream);
  put_around(values, range(v, tokens - last, tokens, stream), first % window_, stream);
  return history;
}

} // namespace executorch_mlx
