// Reading and writing parts of a tensor, by slices or by tensors of indices.
#pragma once

#include "device.h"
#include "memory/views.h"
#include "mlx_internals/graph.h"
#include "mlx_internals/internals.h"
#include "call/context.h"

namespace executorch_mlx {

// Returns `indices` for an axis of `length` elements, all within bounds: [-length, length) if `from_end`, otherwise
// [0, length). MLX does not check indices and would access memory out of bounds. If the indices are on the host, throws
// if one is out of bounds. Computed indices are clamped instead, because checking them would need an evaluation.
inline mx::array bounded_indices(const mx::array& indices, int length, Context& c, bool from_end = true) {
  const auto dtype = indices.dtype();
  check_program(is_integral(dtype), "indices: got ", name(dtype), ", expected an integer dtype");
  if (indices.size() == 0) {
    return indices;
  }
  check_argument(length > 0, "indices: expected none, because the axis is empty");
  const int64_t lowest = from_end ? -int64_t{length} : 0;
  if (is_on_host(indices)) {
    for_each_integer(indices, [&](int64_t index) {
      check_argument(
          index >= lowest && index < length, "index ", index, " is out of range [", lowest, ", ", length, ")");
    });
    return indices;
  }
  // If no value of the dtype can reach `length`, there is nothing to clamp from above.
  const int bits = static_cast<int>(indices.itemsize()) * 8 - is_signed_integer(dtype);
  const bool all_below = bits < 31 && length > (int64_t{1} << bits);
  mx::array result = indices;
  if (!all_below) {
    result = mx::minimum(result, views::scalar_for(result, mx::array(length - 1, dtype), c.stream), c.stream);
  }
  if (is_signed_integer(dtype) && !(all_below && from_end)) {
    result = mx::maximum(result, views::scalar_for(result, mx::array(lowest, dtype), c.stream), c.stream);
  }
  return result;
}

// If x is a range of integers that is not evaluated, returns the elements at these indices, which must be within
// bounds, as an array on the host. Else returns nullopt. The host can then read the elements at once. Exported programs
// check positions and rows in this way: on a GPU, each check would make the host wait for the device.
inline std::optional<mx::array> elements_of_range(
    const mx::array& x, const std::vector<int64_t>& indices, const mx::Shape& shape) {
  const auto range = internals::are_usable() ? internals::range_of(x) : std::nullopt;
  if (!range) {
    return std::nullopt;
  }
  std::vector<int64_t> elements;
  for (const int64_t index : indices) {
    const int64_t position = index < 0 ? index + x.shape(0) : index;
    elements.push_back(range->start + position * range->step);
  }
  return mx::array(elements.begin(), shape, x.dtype());
}

// The indices [start, stop) on an axis. Both bounds count from the front and are at most the length of the axis. In a
// slice with a negative step, start > stop, and -length - 1 stands for a stop before the first element.
struct Range {
  int axis;
  int start;
  int stop;
};

// The range of a slice of x with a positive step. As in Python, negative bounds of the node count from the end, and
// bounds that are too large or too small stand for the ends of the axis.
template <typename Node>
Range checked_range(const Node& n, const mx::array& x, Context& c) {
  const int axis = checked_axis(c.checked_int("axis", n.axis()), static_cast<int>(x.ndim()));
  const int64_t length = x.shape(axis);
  const auto bound = [&](int64_t position) {
    return static_cast<int>(std::clamp<int64_t>(position < 0 ? position + length : position, 0, length));
  };
  check_program(n.step() > 0, "step: got ", n.step(), ", expected 1 or more");
  const int start = bound(c.integer(n.start()));
  return {axis, start, std::max(start, bound(c.integer(n.stop())))};
}

// The arguments of mx::slice, which takes bounds for every axis: `range` on its axis, and the whole length of all other
// axes. MLX adds the step to the length in 32 bits. To avoid an overflow, a longer step is reduced to the
// length of the range, which selects the same elements.
struct Slices {
  Slices(const mx::array& x, const Range& range, int step = 1)
      : start(x.ndim(), 0), stop(x.shape()), steps(x.ndim(), 1) {
    start[range.axis] = range.start;
    stop[range.axis] = range.stop;
    steps[range.axis] = std::min(step, std::max(1, range.stop - range.start));
  }
  mx::Shape start;
  mx::Shape stop;
  mx::Shape steps;
};

} // namespace executorch_mlx
