#pragma once

#include "ops/row.h"

namespace executorch_mlx {

// Indices into `length` positions, negative ones counting from the end. MLX
// reads and writes wherever an index leads, so: indices that are there already
// are checked, computed ones are clamped.
inline mx::array checked_indices(
    const mx::array& indices,
    int length,
    Context& c,
    bool from_end = true) {
  const auto dtype = indices.dtype();
  check_program(is_integral(dtype), "indices are ", name(dtype), ", an integer dtype was expected");
  if (indices.size() == 0) {
    return indices;
  }
  check_argument(length > 0, "indices into an axis that is empty");
  const int64_t lowest = from_end ? -int64_t{length} : 0;
  if (is_on_host(indices)) {
    for_each_integer(indices, [&](int64_t index) {
      check_argument(
          index >= lowest && index < length, "index ", index, " is outside [", lowest, ", ", length, ")");
    });
    return indices;
  }
  const int bits = static_cast<int>(indices.itemsize()) * 8 - is_signed(dtype);
  const bool all_below = bits < 31 && length > (int64_t{1} << bits);
  mx::array result = indices;
  if (!all_below) {
    result = mx::minimum(result, mx::array(length - 1, dtype), c.stream);
  }
  if (is_signed(dtype) && !(all_below && from_end)) {
    result = mx::maximum(result, mx::array(lowest, dtype), c.stream);
  }
  return result;
}

// A Python-like [start, stop) on an axis.
struct Range {
  int axis;
  int start;
  int stop;
};

template <typename Node>
Range checked_range(const Node& n, const mx::array& x, Context& c) {
  const int axis = checked_axis(c.size("axis", n.axis()), static_cast<int>(x.ndim()));
  const int64_t length = x.shape(axis);
  const auto bound = [&](int64_t position) {
    return static_cast<int>(std::clamp<int64_t>(position < 0 ? position + length : position, 0, length));
  };
  check_program(n.step() > 0, "step ", n.step(), " is not positive");
  const int start = bound(c.integer(n.start()));
  return {axis, start, std::max(start, bound(c.integer(n.stop())))};
}

// The same as MLX's slice, which wants it for every axis.
struct Slices {
  Slices(const mx::array& x, const Range& range, int step = 1)
      : start(x.ndim(), 0), stop(x.shape()), steps(x.ndim(), 1) {
    start[range.axis] = range.start;
    stop[range.axis] = range.stop;
    steps[range.axis] = step;
  }
  mx::Shape start;
  mx::Shape stop;
  mx::Shape steps;
};

// From `start` down to what is behind `stop`. MLX counts a negative stop from the
// end, so that the one before the first element is below them all.
inline void slice_backwards(const fb::SliceParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(c.size("axis", n.axis()), static_cast<int>(x.ndim()));
  const int length = x.shape(axis);
  const auto bound = [&](int64_t position) {
    return static_cast<int>(std::clamp<int64_t>(position < 0 ? position + length : position, -1, length - 1));
  };
  const int start = bound(c.integer(n.start()));
  const int stop = bound(c.integer(n.stop()));
  if (start <= stop) {
    const Slices nothing(x, {axis, 0, 0});
    return c.set(n.out(), mx::slice(x, nothing.start, nothing.stop, nothing.steps, c.stream));
  }
  const Slices at(x, {axis, start, stop < 0 ? -length - 1 : stop}, std::max(n.step(), -length));
  c.set(n.out(), mx::slice(x, at.start, at.stop, at.steps, c.stream));
}

inline void slice(const fb::SliceParams& n, Context& c) {
  if (n.step() < 0) {
    return slice_backwards(n, c);
  }
  const auto& x = c.in(n.x());
  const Slices at(x, checked_range(n, x, c), n.step());
  c.set(n.out(), mx::slice(x, at.start, at.stop, at.steps, c.stream));
}

inline void slice_update(const fb::SliceUpdateParams& n, Context& c) {
  const auto update = c.in(n.update());
  const auto dst = c.take(n.dst(), n.out());
  const auto range = checked_range(n, dst, c);
  const Slices at(dst, range, n.step());
  const int length = (range.stop - range.start + n.step() - 1) / n.step();
  const auto at_axis = static_cast<int>(update.ndim()) - static_cast<int>(dst.ndim()) + range.axis;
  const int rows = at_axis < 0 ? 1 : update.shape(at_axis);
  check_argument(
      rows == length || rows == 1,
      "update has ", rows, " rows for the ", length, " of [", range.start, ", ", range.stop, ") on axis ", range.axis);
  if (length == 0) {
    return c.set(n.out(), dst);
  }
  c.set(n.out(), mx::slice_update(dst, update, at.start, at.stop, at.steps, c.stream));
}

inline void take(const fb::TakeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const int length = x.shape(axis);
  const auto& index = *n.index();
  if (index.kind() == 2) {
    const auto indices = checked_indices(c.in(index.tid()), length, c);
    return c.set(n.out(), mx::take(x, indices, axis, c.stream));
  }
  const int64_t position = index.kind() == 0 ? index.literal() : c.integer(index.vid());
  check_argument(
      position >= -int64_t{length} && position < length,
      "index ", position, " is outside [", -length, ", ", length, ")");
  const auto at = static_cast<int>(position < 0 ? position + length : position);
  c.set(n.out(), mx::take(x, at, axis, c.stream));
}

inline void take_along_axis(const fb::TakeAlongAxisParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const auto indices = checked_indices(c.in(n.indices()), x.shape(axis), c);
  check_argument(indices.ndim() == x.ndim(), "indices have ", indices.ndim(), " axes, x has ", x.ndim());
  for (int i = 0; i < static_cast<int>(x.ndim()); ++i) {
    check_argument(
        i == axis || indices.shape(i) == x.shape(i) || indices.shape(i) == 1 || x.shape(i) == 1,
        "indices of shape ", dims(indices.shape()), " do not fit x on axis ", i);
  }
  c.set(n.out(), mx::take_along_axis(x, indices, axis, c.stream));
}

inline void gather(const fb::GatherParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& axes = *n.axes();
  check_program(
      axes.size() == n.indices()->size(), n.indices()->size(), " indices came for ", axes.size(), " axes");
  check_program(
      n.slice_sizes()->size() == x.ndim(), n.slice_sizes()->size(), " slice_sizes came, x has ", x.ndim(), " axes");
  mx::Shape sizes;
  for (int i = 0; i < static_cast<int>(x.ndim()); ++i) {
    sizes.push_back(n.slice_sizes()->Get(i));
    check_program(
        sizes[i] >= 0 && sizes[i] <= x.shape(i), "slice size ", sizes[i], " on axis ", i, " is outside [0, ", x.shape(i), "]");
  }
  const auto checked = checked_axes(&axes, static_cast<int>(x.ndim()));
  std::vector<mx::array> indices;
  for (uint32_t i = 0; i < axes.size(); ++i) {
    const int axis = checked[i];
    // A slice of several has to fit behind its index, also if that is negative.
    indices.push_back(checked_indices(
        c.in(n.indices()->Get(i)), x.shape(axis) - std::max(sizes[axis] - 1, 0), c, sizes[axis] <= 1));
  }
  check_program(!indices.empty(), "no indices came");
  c.set(n.out(), mx::gather(x, indices, std::vector<int>(checked.begin(), checked.end()), sizes, c.stream));
}

// Rows one after the other are a slice update, which MLX makes in place.
inline mx::array copy_runs(mx::array dst, const mx::array& update, const mx::array& indices, int axis, Context& c) {
  std::vector<int> rows;
  for_each_integer(indices, [&](int64_t row) {
    rows.push_back(static_cast<int>(row < 0 ? row + dst.shape(axis) : row));
  });
  for (size_t first = 0; first < rows.size();) {
    size_t last = first + 1;
    while (last < rows.size() && rows[last] == rows[last - 1] + 1) {
      ++last;
    }
    const Slices from(update, {axis, static_cast<int>(first), static_cast<int>(last)});
    const Slices to(dst, {axis, rows[first], rows[last - 1] + 1});
    const bool whole = first == 0 && last == rows.size();
    dst = mx::slice_update(
        dst, whole ? update : mx::slice(update, from.start, from.stop, c.stream), to.start, to.stop, c.stream);
    first = last;
  }
  return dst;
}

inline void index_copy(const fb::IndexCopyParams& n, Context& c) {
  const auto update = c.in(n.update());
  const auto given = c.in(n.indices());
  auto dst = c.take(n.dst(), n.out());
  const int axis = checked_axis(n.axis(), static_cast<int>(dst.ndim()));
  check_argument(given.ndim() == 1, "indices have ", given.ndim(), " axes, 1 was expected");
  auto expected = dst.shape();
  expected[axis] = given.shape(0);
  check_argument(
      update.shape() == expected, "update is of shape ", dims(update.shape()), ", ", dims(expected), " was expected");
  const auto indices = checked_indices(given, dst.shape(axis), c);
  if (update.size() == 0) {
    return c.set(n.out(), std::move(dst));
  }
  if (is_on_host(indices)) {
    return c.set(n.out(), copy_runs(std::move(dst), update, indices, axis, c));
  }
  // Scatter wants the index's axes in front, then a slice of one row.
  const auto rows = mx::expand_dims(mx::moveaxis(update, axis, 0, c.stream), axis + 1, c.stream);
  c.set(n.out(), mx::scatter(dst, indices, mx::astype(rows, dst.dtype(), c.stream), axis, c.stream));
}

// torch's scatter_add: indices may cover a corner of x, updates may exceed them.
inline void scatter_add(const fb::ScatterAddParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& updates = c.in(n.updates());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const auto indices = checked_indices(c.in(n.indices()), x.shape(axis), c);
  check_argument(
      indices.ndim() == x.ndim() && updates.ndim() == x.ndim(),
      "indices have ", indices.ndim(), " and updates ", updates.ndim(), " axes, x has ", x.ndim());
  if (indices.size() == 0) {
    return c.set(n.out(), x);
  }
  const mx::Shape origin(x.ndim(), 0);
  auto corner = indices.shape();
  corner[axis] = x.shape(axis);
  for (int i = 0; i < static_cast<int>(x.ndim()); ++i) {
    check_argument(
        corner[i] <= x.shape(i) && indices.shape(i) <= updates.shape(i),
        "indices of shape ", dims(indices.shape()), " exceed x or updates on axis ", i);
  }
  const auto added = mx::astype(mx::slice(updates, origin, indices.shape(), c.stream), x.dtype(), c.stream);
  const bool whole = corner == x.shape();
  const auto sum = mx::scatter_add_axis(
      whole ? x : mx::slice(x, origin, corner, c.stream), indices, added, axis, c.stream);
  c.set(n.out(), whole ? sum : mx::slice_update(x, sum, origin, corner, c.stream));
}

constexpr Row kIndexRows[] = {
    MLX_ROW(GatherNode, gather),
    MLX_ROW(IndexCopyNode, index_copy),
    MLX_ROW(ScatterAddNode, scatter_add),
    MLX_ROW(SliceNode, slice),
    MLX_ROW(SliceUpdateNode, slice_update),
    MLX_ROW(TakeAlongAxisNode, take_along_axis),
    MLX_ROW(TakeNode, take),
};

} // namespace executorch_mlx
