// Reading and writing parts of a tensor, by slices or by tensors of indices. See op.h.
#include "ops/index.h"

#include "device.h"
#include "gpu/fused.h"
#include "memory/views.h"
#include "mlx_internals/graph.h"
#include "mlx_internals/internals.h"
#include "ops/op.h"

namespace executorch_mlx {

namespace {

// A slice with a negative step. If it includes the first element, it must stop at the place before that element. For
// MLX this place is -length - 1, because MLX counts a negative stop from the end: -1 is the last element.
void slice_backwards(const fb::SliceParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(c.checked_int("axis", n.axis()), static_cast<int>(x.ndim()));
  const int length = x.shape(axis);
  const auto bound = [&](int64_t position) {
    return static_cast<int>(std::clamp<int64_t>(position < 0 ? position + length : position, -1, length - 1));
  };
  const int start = bound(c.integer(n.start()));
  const int stop = bound(c.integer(n.stop()));
  if (start <= stop) {
    const Slices empty(x, {axis, 0, 0});
    return c.set(n.out(), mx::slice(x, empty.start, empty.stop, empty.steps, c.stream));
  }
  const Slices at(x, {axis, start, stop < 0 ? -length - 1 : stop}, std::max(n.step(), -length));
  c.set(n.out(), mx::slice(x, at.start, at.stop, at.steps, c.stream));
}

void slice(const fb::SliceParams& n, Context& c) {
  if (n.step() < 0) {
    return slice_backwards(n, c);
  }
  const auto& x = c.in(n.x());
  const Slices at(x, checked_range(n, x, c), n.step());
  c.set(n.out(), views::slice(x, at.start, at.stop, at.steps, c.stream));
}

void slice_update(const fb::SliceUpdateParams& n, Context& c) {
  const auto update = c.in(n.update());
  auto dst = c.in_for_update(n.dst(), n.out());
  const auto range = checked_range(n, dst, c);
  const Slices at(dst, range, n.step());
  const int step = at.steps[range.axis];
  const int length = (range.stop - range.start + step - 1) / step;
  const auto update_axis = static_cast<int>(update.ndim()) - static_cast<int>(dst.ndim()) + range.axis;
  const int size = update_axis < 0 ? 1 : update.shape(update_axis);
  check_argument(size == length || size == 1, "update: got size ", size, ", expected ", length, " for [", range.start,
      ", ", range.stop, ") on axis ", range.axis);
  if (length == 0) {
    return c.set(n.out(), dst);
  }
  c.set_updated(n.out(), std::move(dst), update, at.start, at.stop, at.steps);
}

void take(const fb::TakeParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const int length = x.shape(axis);
  const auto& index = *n.index();
  if (index.kind() == 2) {
    const auto& unchecked = c.in(index.tid());
    if (axis == 0 && c.stream.device == mx::Device::gpu) {
      if (is_on_host(unchecked)) {
        bounded_indices(unchecked, length, c);
      }
      if (const auto y = gpu::embedding(x, unchecked, c.stream)) {
        return c.set(n.out(), *y);
      }
    }
    const auto indices = bounded_indices(unchecked, length, c);
    if (x.size() == 0) { // MLX refuses it, although another axis may be the empty one
      auto shape = x.shape();
      shape.erase(shape.begin() + axis);
      shape.insert(shape.begin() + axis, indices.shape().begin(), indices.shape().end());
      return c.set(n.out(), mx::zeros(shape, x.dtype(), c.stream));
    }
    return c.set(n.out(), axis == 0 ? c.take_rows(x, indices) : mx::take(x, indices, axis, c.stream));
  }
  const int64_t position = index.kind() == 0 ? index.literal() : c.integer(index.vid());
  check_argument(position >= -int64_t{length} && position < length, "index ", position, " is out of range [", -length,
      ", ", length, ")");
  if (const auto y = elements_of_range(x, {position}, {})) {
    return c.set(n.out(), *y);
  }
  const auto at = static_cast<int>(position < 0 ? position + length : position);
  c.set(n.out(), views::take(x, at, axis, c.stream));
}

void take_along_axis(const fb::TakeAlongAxisParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const auto indices = bounded_indices(c.in(n.indices()), x.shape(axis), c);
  check_argument(indices.ndim() == x.ndim(), "indices: got ", indices.ndim(), " axes, expected ", x.ndim());
  for (int i = 0; i < static_cast<int>(x.ndim()); ++i) {
    check_argument(i == axis || indices.shape(i) == x.shape(i) || indices.shape(i) == 1 || x.shape(i) == 1,
        "indices: got shape ", dims(indices.shape()), ", expected size ", x.shape(i), " or 1 on axis ", i);
  }
  c.set(n.out(), mx::take_along_axis(x, indices, axis, c.stream));
}

void gather(const fb::GatherParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& axes = *n.axes();
  check_program(axes.size() == n.indices()->size(), "indices: got ", n.indices()->size(), ", expected one for each of ",
      axes.size(), " axes");
  check_program(
      n.slice_sizes()->size() == x.ndim(), "slice_sizes: got ", n.slice_sizes()->size(), ", expected ", x.ndim());
  mx::Shape sizes;
  for (int i = 0; i < static_cast<int>(x.ndim()); ++i) {
    sizes.push_back(n.slice_sizes()->Get(i));
    check_program(sizes[i] >= 0 && sizes[i] <= x.shape(i), "slice size ", sizes[i], " on axis ", i,
        " is out of range [0, ", x.shape(i), "]");
  }
  const auto checked = checked_axes(&axes, static_cast<int>(x.ndim()));
  std::vector<mx::array> indices;
  for (uint32_t i = 0; i < axes.size(); ++i) {
    const int axis = checked[i];
    // A slice begins at its index and must end within x. So for a slice longer than 1, the largest valid index is
    // lower, and an index that counts from the end is not allowed.
    indices.push_back(
        bounded_indices(c.in(n.indices()->Get(i)), x.shape(axis) - std::max(sizes[axis] - 1, 0), c, sizes[axis] <= 1));
  }
  check_program(!indices.empty(), "indices: expected at least one");
  if (sizes == mx::Shape{1} && is_on_host(indices[0])) {
    std::vector<int64_t> positions;
    for_each_integer(indices[0], [&](int64_t index) { positions.push_back(index); });
    mx::Shape shape = indices[0].shape();
    shape.push_back(1);
    if (const auto y = elements_of_range(x, positions, shape)) {
      return c.set(n.out(), *y);
    }
  }
  c.set(n.out(), mx::gather(x, indices, std::vector<int>(checked.begin(), checked.end()), sizes, c.stream));
}

// Positions `first` to `last` - 1 of a list of indices, which hold the consecutive indices `target`, `target` + 1, ...
struct Run {
  int first;
  int last;
  int target;
};

// Splits `indices` into runs of consecutive indices. The indices must be on the host; `length` is that of the axis.
std::vector<Run> find_runs(const mx::array& indices, int length) {
  std::vector<Run> runs;
  int i = 0;
  for_each_integer(indices, [&](int64_t index) {
    const auto target = static_cast<int>(index < 0 ? index + length : index);
    if (runs.empty() || target != runs.back().target + i - runs.back().first) {
      runs.push_back({i, i, target});
    }
    runs.back().last = ++i;
  });
  return runs;
}

// Copies slices of `update` to the runs of indices of `axis`, and writes the result to the slot `out`. Each run takes
// one slice update, which can be made in place.
void copy_runs(
    const fb::Tid* out, mx::array dst, const mx::array& update, const std::vector<Run>& runs, int axis, Context& c) {
  for (size_t i = 0; i < runs.size(); ++i) {
    const Run& run = runs[i];
    const Slices from(update, {axis, run.first, run.last});
    const Slices to(dst, {axis, run.target, run.target + run.last - run.first});
    const auto part = views::slice(update, from.start, from.stop, from.steps, c.stream);
    if (i + 1 == runs.size()) {
      return c.set_updated(out, std::move(dst), part, to.start, to.stop, to.steps);
    }
    dst = mx::slice_update(dst, part, to.start, to.stop, c.stream);
  }
}

void index_copy(const fb::IndexCopyParams& n, Context& c) {
  const auto update = c.in(n.update());
  const auto index = c.in(n.indices());
  auto dst = c.in_for_update(n.dst(), n.out());
  const int axis = checked_axis(n.axis(), static_cast<int>(dst.ndim()));
  check_argument(index.ndim() == 1, "indices: got ", index.ndim(), " axes, expected 1");
  auto expected = dst.shape();
  expected[axis] = index.shape(0);
  check_argument(update.shape() == expected, "update: got shape ", dims(update.shape()), ", expected ", dims(expected));
  const auto indices = bounded_indices(index, dst.shape(axis), c);
  if (update.size() == 0) {
    return c.set(n.out(), std::move(dst));
  }
  constexpr size_t kMaxRuns = 1024; // bounds the size of the graph
  if (is_on_host(indices)) {
    const auto runs = find_runs(indices, dst.shape(axis));
    if (runs.size() <= kMaxRuns) {
      return copy_runs(n.out(), std::move(dst), update, runs, axis, c);
    }
  }
  // mx::scatter expects the axis of the indices first, followed by all axes of `dst`, with size 1 for the indexed axis.
  const auto slices = mx::expand_dims(mx::moveaxis(update, axis, 0, c.stream), axis + 1, c.stream);
  // MLX scatters elements of 8 bytes on the CPU only. `slices` stays on c.stream: the CPU waits for it, and so for all
  // earlier kernels that read `dst`.
  const auto stream = dst.itemsize() == 8 ? host_stream(c.stream) : c.stream;
  c.set(n.out(), mx::scatter(dst, indices, mx::astype(slices, dst.dtype(), c.stream), axis, stream));
}

// As in torch, `indices` may be smaller than `updates` on any axis, and smaller than x on any axis other than `axis`.
// On such an axis, only the first elements of `updates`, as many as `indices` has, are added, and only to the first
// elements of x.
void scatter_add(const fb::ScatterAddParams& n, Context& c) {
  const auto& x = c.in(n.x());
  const auto& updates = c.in(n.updates());
  const int axis = checked_axis(n.axis(), static_cast<int>(x.ndim()));
  const auto indices = bounded_indices(c.in(n.indices()), x.shape(axis), c);
  check_argument(indices.ndim() == x.ndim() && updates.ndim() == x.ndim(), "got indices with ", indices.ndim(),
      " and updates with ", updates.ndim(), " axes, expected ", x.ndim());
  if (indices.size() == 0) {
    return c.set(n.out(), x);
  }
  const mx::Shape origin(x.ndim(), 0);
  auto corner = indices.shape(); // the shape of the part of x to which something is added
  corner[axis] = x.shape(axis);
  for (int i = 0; i < static_cast<int>(x.ndim()); ++i) {
    check_argument(corner[i] <= x.shape(i) && indices.shape(i) <= updates.shape(i), "indices: shape ",
        dims(indices.shape()), " exceeds x or updates on axis ", i);
  }
  const auto added = mx::astype(mx::slice(updates, origin, indices.shape(), c.stream), x.dtype(), c.stream);
  const bool whole = corner == x.shape();
  const auto sum =
      mx::scatter_add_axis(whole ? x : mx::slice(x, origin, corner, c.stream), indices, added, axis, c.stream);
  c.set(n.out(), whole ? sum : mx::slice_update(x, sum, origin, corner, c.stream));
}

} // namespace

MLX_OP(GatherNode, gather)
MLX_OP(IndexCopyNode, index_copy)
MLX_OP(ScatterAddNode, scatter_add)
MLX_OP(SliceNode, slice)
MLX_OP(SliceUpdateNode, slice_update)
MLX_OP(TakeAlongAxisNode, take_along_axis)
MLX_OP(TakeNode, take)

} // namespace executorch_mlx
