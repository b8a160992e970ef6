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

mx::array grown(const std::optional<mx::array>& cells, const mx::array& x, int start, int needed, mx::Stream stream) {
  mx::Shape shape = x.shape();
  shape[kPositions] = static_cast<int>(std::bit_ceil(std::max(static_cast<uint32_t>(needed), kLeastCapacity)));
  Context::check_size(shape, x.dtype());
  const auto empty = mx::zeros(shape, x.dtype(), stream);
  if (start == 0) {
    return empty;
  }
  mx::Shape stop = cells->shape();
  stop[kPositions] = start;
  const mx::Shape zero(4, 0);
  return mx::slice_update(empty, mx::slice(*cells, zero, stop, stream), zero, stop, stream);
}

// Leaves `cells` the only owner of what it held, for the update to be in place.
void put(std::optional<mx::array>& cells, const mx::array& x, int start, mx::Stream stream) {
  const int needed = start + x.shape(kPositions);
  if (!cells || cells->shape(kPositions) < needed) {
    cells = grown(cells, x, start, needed, stream);
  }
  mx::Shape from(4, 0);
  from[kPositions] = start;
  mx::Shape to = x.shape();
  to[kPositions] = needed;
  const mx::array before = std::move(*cells);
  cells = mx::slice_update(before, x, from, to, stream);
}

} // namespace

void KvLayer::append(const mx::array& k, const mx::array& v, int start, mx::Stream stream) {
  check_argument(
      start <= length, "position ", start, " leaves a hole after the ", length, " that the cache holds");
  if (!fits(keys, k) || !fits(values, v)) {
    check_argument(
        start == 0, "k is ", describe(k), ", v ", describe(v), ", the cache holds ",
        describe(keys.value_or(k)), " and ", describe(values.value_or(v)));
    *this = KvLayer();
  }
  check_argument(
      int64_t{start} + k.shape(kPositions) <= std::numeric_limits<int32_t>::max() / 2,
      "position ", start, " is more than a cache can hold");
  put(keys, k, start, stream);
  put(values, v, start, stream);
  length = start + k.shape(kPositions);
}

mx::array KvLayer::held(const mx::array& cells, mx::Stream stream) const {
  mx::Shape stop = cells.shape();
  stop[kPositions] = length;
  return mx::slice(cells, mx::Shape(4, 0), stop, stream);
}

} // namespace executorch_mlx
