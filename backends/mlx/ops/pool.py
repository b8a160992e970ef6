"""Lowers max and average pooling, one axis at a time: gather the windows of an axis, then reduce each window.

The gather is a reshape in two cases: the windows tile an axis of static extent (global pooling, stride = kernel,
adaptive pooling to a divisor of the extent), or adaptive pooling has one output element. Otherwise the gather reads a
table of indices, [windows, elements of a window]. The table is a constant if the extent of the axis is static. If the
extent is dynamic, the MLX program computes the table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot
from ..extents import is_empty

aten = torch.ops.aten


@dataclass(frozen=True)
class Strided:
    """Ordinary pooling of an axis: window `w` starts at w * stride - padding and has `size` elements, `dilation` apart.

    `counts_padding` says whether the mean of a window also counts the elements in the padding; torch calls this
    `count_include_pad`. In the methods, `extent` is the extent of the axis, and `count` the number of windows.
    """

    size: int
    stride: int
    padding: int = 0
    dilation: int = 1
    counts_padding: bool = True
    ceil_mode: bool = False

    @property
    def span(self) -> int:
        """The distance from the first element of a window to its last."""
        return self.dilation * (self.size - 1)

    @property
    def can_miss(self) -> bool:
        """Whether all indices of a window can be outside of an axis that is shorter than the dilation."""
        return self.dilation > 1 and self.padding > 0

    def windows(self, extent: int, count: int) -> list[range]:
        """Return the indices that each window covers, including indices in the padding, which lie outside the axis."""
        starts = range(-self.padding, count * self.stride - self.padding, self.stride)
        return [range(s, s + self.size * self.dilation, self.dilation) for s in starts]

    def divisors(self, extent: int, count: int) -> list[int]:
        """Return, for each window, the number by which the mean divides.

        In ceil_mode, a window may extend beyond the padding. Elements beyond the padding never count.
        """
        padding = self.padding if self.counts_padding else 0
        return [min(w.stop, extent + padding) - max(w.start, -padding) for w in self.windows(extent, count)]

    def dynamic_windows(self, extent):
        """Compute the windows for a dynamic extent.

        Returns three tensors: the indices [count, size] that the windows cover; a bool mask [count, size] of the
        indices that lie inside the axis; and the first index inside the axis for each window, [count, 1].
        """
        last_start = extent + 2 * self.padding - self.span - 1
        count = (last_start + (self.stride - 1 if self.ceil_mode else 0)) // self.stride + 1
        start = (torch.arange(count) * self.stride - self.padding).unsqueeze(1)
        indices = start + torch.arange(self.size) * self.dilation
        before = torch.clamp(-start, min=0)  # the padding in front of the axis that the window covers
        skipped = torch.floor_divide(before + self.dilation - 1, self.dilation)
        first = start + skipped * self.dilation
        return indices, (indices >= 0) & (indices < extent), first

    def dynamic_divisors(self, extent):
        """Compute the divisors for a dynamic extent. Returns one number for all windows, or a tensor [count]."""
        if self.counts_padding:
            return self.size
        _, inside, _ = self.dynamic_windows(extent)
        return inside.sum(1)


@dataclass(frozen=True)
class Adaptive:
    """Adaptive pooling of an axis to `count` elements, with the methods of `Strided`.

    Window `w` covers the indices from floor(w * extent / count) up to ceil((w + 1) * extent / count), exclusive.
    """

    count: int
    can_miss = False

    def windows(self, extent: int, count: int) -> list[range]:
        return [range(w * extent // count, -(-(w + 1) * extent // count)) for w in range(count)]

    def divisors(self, extent: int, count: int) -> list[int]:
        return [len(w) for w in self.windows(extent, count)]

    def _bounds(self, extent):
        window = torch.arange(self.count).unsqueeze(1)
        end = (window + 1) * extent + self.count - 1
        return torch.floor_divide(window * extent, self.count), torch.floor_divide(end, self.count)

    def dynamic_windows(self, extent):
        first, end = self._bounds(extent)
        indices = first + torch.arange((extent + self.count - 1) // self.count + 1)
        return indices, indices < end, first

    def dynamic_divisors(self, extent):
        first, end = self._bounds(extent)
        return (end - first).squeeze(1)


Pooling = Strided | Adaptive


def _strided_axes(x, rank, kernel_size, stride, padding, dilation, ceil_mode, counts_padding=True) -> list[Pooling]:
    options = (_one_per_axis(values, rank) for values in (kernel_size, stride or kernel_size, padding, dilation))
    axes: list = [Strided(*numbers, counts_padding, ceil_mode) for numbers in zip(*options)]  # type: ignore[call-arg]
    for axis, extent in zip(axes, x.shape[-rank:]):
        # torch drops a last window that starts in the padding after the axis. Such a window is possible only if
        # stride + padding exceeds the length of a window.
        is_known = isinstance(extent, int) and extent >= axis.dilation
        if not is_known and ceil_mode and axis.stride + axis.padding > axis.span + 1:
            raise Unsupported(
                "ceil_mode over a dimension that is dynamic, or shorter than the dilation, is unsupported if stride + "
                "padding exceeds the window; use ceil_mode=False"
            )
    return axes


def _one_per_axis(values: list[int], rank: int) -> list[int]:
    return values * rank if len(values) == 1 else values


def _extents(P: Lowering, x, rank: int) -> list[tuple[int, int]]:
    """Return the extent before and the extent after pooling, for each pooled axis. These are the last `rank` axes."""
    out = P.out[0] if isinstance(P.out, (list, tuple)) else P.out
    return list(zip(x.shape[-rank:], out.shape[-rank:]))


def _is_static(extents: tuple) -> bool:
    return all(isinstance(extent, int) for extent in extents)


@dataclass(frozen=True)
class PooledAxis:
    """The windows of an axis, as far as they are known at export.

    `count` is the number of windows, or None if the MLX program computes the windows, because the extent is dynamic or
    because a window may have no element. `table` is a constant with the `count * size` indices of the windows. There is
    no table (None) if these indices are 0, 1, 2, …, so that a reshape gathers the windows, or if `count` is None.
    """

    pooling: Pooling
    count: int | None = None
    table: TensorSlot | None = None


def _pooled_axes(P: Lowering, axes: list[Pooling], extents, substitute) -> list[PooledAxis]:
    """Return the windows of each axis.

    `substitute(window, extent)` gives the index that is read in place of an index outside the axis.
    """
    result = []
    for axis, (extent, count) in zip(axes, extents):
        if _is_static((extent, count)) and not (axis.can_miss and extent < axis.dilation):  # type: ignore[union-attr]
            table = _table(P, axis.windows(extent, count), extent, substitute)
            result.append(PooledAxis(axis, count, table))
        elif axis == Adaptive(1):
            result.append(PooledAxis(axis, 1))
        else:
            result.append(PooledAxis(axis))
    return result


def _table(P: Lowering, windows: list[range], extent: int, substitute) -> TensorSlot | None:
    """Return `PooledAxis.table`. The substitute fills up the windows that are shorter than the longest one."""
    widest = max((len(w) for w in windows), default=0)
    indices = []
    for window in windows:
        other = substitute(window, extent)
        inside = [i if 0 <= i < extent else other for i in window]
        indices += inside + [other] * (widest - len(inside))
    if indices == list(range(extent)):
        return None
    return P.constant("windows", torch.tensor(indices, dtype=torch.int64))


def _gather(x, axis: int, table, count: int):
    """Gather the windows of an axis: […, extent, …] → […, count, size, …].

    `axis` is negative. It is the index of the axis in `x`, and of the axis with extent `size` in the result.
    """
    if table is None:
        return x.unflatten(axis, (count, x.shape[axis] // count))
    if table.dim() == 1:
        return x.index_select(axis, table).unflatten(axis, (count, table.shape[0] // count))
    return x.index_select(axis, table.reshape(-1)).unflatten(axis, table.shape)


# -- maximum ------------------------------------------------------------------


def _max_pool(x, tables, pooled_axes):
    """Return the maximum of each window, and its index in the flattened pooled axes.

    If several elements are maximal, the index is that of the first; if several are NaN, that of the last NaN.
    """
    plane = x.shape[-len(pooled_axes) :]
    index = torch.arange(math.prod(plane), device=x.device).reshape(plane).expand(x.shape)
    for axis in range(-1, -len(pooled_axes) - 1, -1):
        pooling, table, count, inside = pooled_axes[axis].pooling, tables[axis], pooled_axes[axis].count, None
        if count is None:
            places, inside, first = pooling.dynamic_windows(x.shape[axis])
            table = torch.where(inside, places, first.clamp(max=x.shape[axis] - 1) if pooling.can_miss else first)
        values = _gather(x, axis, table, count)
        x, which = values.max(axis)
        if inside is not None and pooling.can_miss:
            x = torch.where(inside.any(1).reshape(-1, *[1] * (-axis - 1)), x, _lowest(x.dtype))
        indices = _gather(index, axis, table, count)
        index = indices.gather(axis, which.unsqueeze(axis)).squeeze(axis)
        if x.is_floating_point():
            last_nan = torch.where(values.isnan(), indices, -1).amax(axis)
            index = torch.where(last_nan < 0, index, last_nan)
    return x, index


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _first_inside(window: range, extent: int) -> int:
    return next(i for i in window if 0 <= i < extent)


def _lower_max(P: Lowering, x, axes: list[Pooling]):
    if is_empty(x.shape):
        raise Unsupported("an empty input is unsupported")
    pooled_axes = _pooled_axes(P, axes, _extents(P, x, len(axes)), _first_inside)
    return P.trace(_max_pool, x, [a.table for a in pooled_axes], pooled_axes)


def _max_pool_over(rank: int):
    def lower(P: Lowering, self, kernel_size, stride, padding, dilation, ceil_mode):
        return _lower_max(P, self, _strided_axes(self, rank, kernel_size, stride, padding, dilation, ceil_mode))

    return lower


REGISTRY.add(aten.max_pool2d_with_indices.default, _max_pool_over(2))
REGISTRY.add(aten.max_pool3d_with_indices.default, _max_pool_over(3))


def _adaptive_axes(output_size) -> list[Pooling]:
    if not all(isinstance(count, int) for count in output_size):
        raise Unsupported("output_size: a dynamic size is unsupported; pass Python numbers")
    return [Adaptive(count) for count in output_size]


@REGISTRY.lower(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(P: Lowering, self, output_size):
    return _lower_max(P, self, _adaptive_axes(output_size))


# -- average ------------------------------------------------------------------


def _avg_pool(x, tables, pooled_axes, divisors, divisor_override):
    """Return the mean of each window. The sums are float32, as in torch, and are divided once at the end."""
    total = x.float() if x.is_floating_point() else x
    product = 1
    for axis, table, pooled, divisor in zip(range(-len(pooled_axes), 0), tables, pooled_axes, divisors):
        if pooled.count is None:
            extent = x.shape[axis]
            indices, inside, _ = pooled.pooling.dynamic_windows(extent)
            table, divisor = torch.where(inside, indices, extent), pooled.pooling.dynamic_divisors(extent)
        elif divisor is None:
            divisor = x.shape[axis]
        if table is not None:
            # Append a zero, which indices in the padding read.
            zero = torch.zeros_like(total.narrow(axis, 0, 1))
            total = torch.cat([total, zero], axis)
        total = _gather(total, axis, table, pooled.count).sum(axis)
        if isinstance(divisor, torch.Tensor):
            divisor = divisor.to(torch.float32).reshape(-1, *[1] * (-axis - 1))
        product = divisor * product
    return (total / (product if divisor_override is None else divisor_override)).to(x.dtype)


def _lower_avg(P: Lowering, x, axes: list[Pooling], divisor_override: int | None = None):
    if not x.dtype.is_floating_point:
        raise Unsupported(f"input: got {x.dtype}, expected a floating-point dtype; cast it first")
    extents = _extents(P, x, len(axes))
    pooled_axes = _pooled_axes(P, axes, extents, lambda window, extent: extent)
    divisors = [_divisors(P, axis, *pair) for axis, pair in zip(axes, extents)]
    return P.trace(_avg_pool, x, [a.table for a in pooled_axes], pooled_axes, divisors, divisor_override)[0]


def _divisors(P: Lowering, axis: Pooling, extent, count) -> int | TensorSlot | None:
    """Return the divisors of the windows of an axis.

    The result is an int if all windows have the same divisor, else a constant [count]. It is None if the extent is
    dynamic.
    """
    if not _is_static((extent, count)):
        return None
    divisors = axis.divisors(extent, count)
    if len(set(divisors)) == 1:
        return divisors[0]
    return P.constant("window_sizes", torch.tensor(divisors, dtype=torch.float32))


def _avg_pool_over(rank: int):
    def lower(P, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override=None):
        axes = _strided_axes(self, rank, kernel_size, stride, padding, [1], ceil_mode, count_include_pad)
        if ceil_mode and not all(isinstance(extent, int) for extent in self.shape[-rank:]):
            raise Unsupported("ceil_mode over a dynamic dimension is unsupported; use ceil_mode=False")
        return _lower_avg(P, self, axes, divisor_override)

    return lower


REGISTRY.add(aten.avg_pool1d.default, _avg_pool_over(1))
REGISTRY.add(aten.avg_pool2d.default, _avg_pool_over(2))
REGISTRY.add(aten.avg_pool3d.default, _avg_pool_over(3))


@REGISTRY.lower(aten.adaptive_avg_pool1d.default, aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
def adaptive_avg_pool(P: Lowering, self, output_size):
    return _lower_avg(P, self, _adaptive_axes(output_size))
