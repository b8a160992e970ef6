#include "memory/views.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "checks.h"
#include "memory/kernel_result.h"
#include "memory/strided_copy.h"
#include "mlx_internals/arrays.h"
#include "mlx_internals/graph.h"
#include "mlx_internals/internals.h"

namespace executorch_mlx::views {

namespace {

using internals::row_major_strides;
using internals::view;

// Whether view() can make views of x: x is not empty, it is available, and its strides are positive.
bool can_view(const mx::array& x) {
  if (x.size() == 0 || !x.is_available() || !internals::are_usable()) {
    return false;
  }
  for (size_t i = 0; i < x.ndim(); ++i) {
    if (x.shape(static_cast<int>(i)) > 1 && x.strides(static_cast<int>(i)) <= 0) {
      return false;
    }
  }
  return true;
}

// Returns the strides of a view of x with another shape, or nullopt if there is no such view. Divides the axes of x and
// those of the shape into runs, so that the nth runs of both have the same number of elements. If the elements of a run
// of x are evenly spaced in memory, the run can be divided into other axes.
std::optional<mx::Strides> strides_after_reshape(const mx::array& x, const mx::Shape& shape) {
  mx::Strides strides(shape.size(), 1);
  size_t i = 0;
  size_t j = 0;
  while (j < shape.size()) {
    if (shape[j] == 1) {
      ++j;
      continue;
    }
    while (x.shape(static_cast<int>(i)) == 1) {
      ++i;
    }
    int64_t left = x.shape(static_cast<int>(i)); // the number of elements in the run of x
    int64_t right = shape[j]; // the number of elements in the run of `shape`, which has the axes from j to `last`
    size_t last = j;
    int64_t innermost = x.strides(static_cast<int>(i++));
    while (left != right) {
      if (left > right) {
        right *= shape[++last];
        continue;
      }
      const int axis = static_cast<int>(i++);
      if (x.shape(axis) == 1) {
        continue;
      }
      if (innermost != x.strides(axis) * x.shape(axis)) {
        return std::nullopt;
      }
      left *= x.shape(axis);
      innermost = x.strides(axis);
    }
    for (size_t axis = last + 1; axis-- > j;) {
      strides[axis] = innermost;
      innermost *= shape[axis];
    }
    j = last + 1;
  }
  return strides;
}

mx::Shape shape_of(const mx::array& x, const std::vector<int>& axes) {
  mx::Shape shape;
  for (const int axis : axes) {
    shape.push_back(x.shape(axis));
  }
  return shape;
}

// Whether a transposition moves only axes of size 1.
bool keeps_order(const mx::array& x, const std::vector<int>& axes) {
  int last = -1;
  for (const int axis : axes) {
    if (x.shape(axis) != 1) {
      if (axis < last) {
        return false;
      }
      last = axis;
    }
  }
  return true;
}

} // namespace

mx::array reshape(const mx::array& x, const mx::Shape& shape, mx::Stream stream) {
  if (can_view(x)) {
    if (x.flags().row_contiguous) {
      return view(x, shape, row_major_strides(shape), 0);
    }
    if (auto strides = strides_after_reshape(x, shape)) {
      return view(x, shape, std::move(*strides), 0);
    }
    if (cpu::computes_at_once(stream)) {
      return view(cpu::contiguous(x, stream), shape, row_major_strides(shape), 0);
    }
  }
  // On a GPU, each operation of the graph costs the host time, also one that computes nothing.
  const bool skips = stream.device == mx::Device::gpu && is_lazy(x, "Reshape");
  return mx::reshape(skips ? internals::inputs(x)[0] : x, shape, stream);
}

mx::array scalar_for(const mx::array& other, const mx::array& x, mx::Stream stream) {
  return other.size() == 1 ? reshape(x, other.shape(), stream) : x;
}

mx::array transpose(const mx::array& x, const std::vector<int>& axes, mx::Stream stream) {
  if (!can_view(x)) {
    // On a GPU, two transpositions become one, and one that keeps the order a reshape, which costs the host less.
    if (stream.device == mx::Device::gpu && is_lazy(x, "Transpose")) {
      const auto before = internals::axes_of_transposition(x);
      std::vector<int> both;
      for (const int axis : axes) {
        both.push_back(before[axis]);
      }
      return transpose(internals::inputs(x)[0], both, stream);
    }
    return stream.device == mx::Device::gpu && keeps_order(x, axes) ? reshape(x, shape_of(x, axes), stream)
                                                                    : mx::transpose(x, axes, stream);
  }
  mx::Shape shape;
  mx::Strides strides;
  for (const int axis : axes) {
    shape.push_back(x.shape(axis));
    strides.push_back(x.strides(axis));
  }
  return view(x, std::move(shape), std::move(strides), 0);
}

mx::array expand_dims(const mx::array& x, int axis, mx::Stream stream) {
  if (!can_view(x)) {
    return mx::expand_dims(x, axis, stream);
  }
  auto shape = x.shape();
  auto strides = x.strides();
  shape.insert(shape.begin() + axis, 1);
  strides.insert(strides.begin() + axis, 1);
  return view(x, std::move(shape), std::move(strides), 0);
}

mx::array squeeze(const mx::array& x, const std::vector<int>& axes, mx::Stream stream) {
  if (!can_view(x)) {
    return mx::squeeze(x, axes, stream);
  }
  mx::Shape shape;
  mx::Strides strides;
  for (int axis = 0; axis < static_cast<int>(x.ndim()); ++axis) {
    if (std::find(axes.begin(), axes.end(), axis) == axes.end()) {
      shape.push_back(x.shape(axis));
      strides.push_back(x.strides(axis));
    }
  }
  return view(x, std::move(shape), std::move(strides), 0);
}

mx::array take(const mx::array& x, int index, int axis, mx::Stream stream) {
  auto shape = x.shape();
  shape.erase(shape.begin() + axis);
  if (x.size() == 0) { // MLX refuses it, although another axis is the empty one
    return mx::zeros(shape, x.dtype(), stream);
  }
  if (!can_view(x)) {
    return mx::take(x, index, axis, stream);
  }
  auto strides = x.strides();
  const int64_t offset = index * strides[axis];
  strides.erase(strides.begin() + axis);
  return view(x, std::move(shape), std::move(strides), offset);
}

mx::array slice(
    const mx::array& x, const mx::Shape& start, const mx::Shape& stop, const mx::Shape& steps, mx::Stream stream) {
  const auto is_empty = [&] {
    for (size_t i = 0; i < start.size(); ++i) {
      if (stop[i] <= start[i]) {
        return true;
      }
    }
    return false;
  };
  if (!can_view(x) || is_empty()) {
    return mx::slice(x, start, stop, steps, stream);
  }
  mx::Shape shape;
  mx::Strides strides;
  int64_t offset = 0;
  for (size_t i = 0; i < start.size(); ++i) {
    shape.push_back((stop[i] - start[i] + steps[i] - 1) / steps[i]);
    strides.push_back(x.strides()[i] * steps[i]);
    offset += x.strides()[i] * start[i];
  }
  return view(x, std::move(shape), std::move(strides), offset);
}

} // namespace executorch_mlx::views
