"""Pooling, one axis after the other: gather the windows of an axis, then reduce each.

Windows that tile the axis (global pooling, stride = kernel, adaptive pooling of a multiple) are
a reshape; all others are taken by a table of positions. The table is a constant, or computed at
run time where the extent of the axis is dynamic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot

aten = torch.ops.aten


@dataclass(frozen=True)
class Spaced:
    """Output o of an axis reads `size` elements, `dilation` apart, from o * stride - padding on."""

    size: int
    stride: int
    padding: int = 0
    dilation: int = 1
    counts_padding: bool = True
    ceil_mode: bool = False

    @property
    def reach(self) -> int:
        """From the first element of a window to its last."""
        return self.dilation * (self.size - 1)

    def windows(self, extent: int, count: int) -> list[range]:
        starts = range(-self.padding, count * self.stride - self.padding, self.stride)
        return [range(s, s + self.size * self.dilation, self.dilation) for s in starts]

    def sizes(self, extent: int, count: int) -> list[int]:
        """How many elements a mean counts: a window of ceil_mode may reach beyond the padding too."""
        padding = self.padding if self.counts_padding else 0
        return [
            min(w.stop, extent + padding) - max(w.start, -padding) for w in self.windows(extent, count)
        ]

    def table(self, extent):
        """`windows` as positions [count, size]; then those within the axis, and the first of each."""
        room = extent + 2 * self.padding - self.reach - 1
        count = (room + (self.stride - 1 if self.ceil_mode else 0)) // self.stride + 1
        start = (torch.arange(count) * self.stride - self.padding).unsqueeze(1)
        positions = start + torch.arange(self.size) * self.dilation
        outside = torch.clamp(-start, min=0) + self.dilation - 1
        first = start + torch.floor_divide(outside, self.dilation) * self.dilation
        return positions, (positions >= 0) & (positions < extent), first

    def counted(self, extent):
        if self.counts_padding:
            return self.size
        _, inside, _ = self.table(extent)
        return inside.sum(1)


@dataclass(frozen=True)
class Adaptive:
    """`count` windows that cover the axis: the oth from o / count of it to (o + 1) / count."""

    count: int

    def windows(self, extent: int, count: int) -> list[range]:
        return [range(o * extent // count, -(-(o + 1) * extent // count)) for o in range(count)]

    def sizes(self, extent: int, count: int) -> list[int]:
        return [len(w) for w in self.windows(extent, count)]

    def _bounds(self, extent):
        at = torch.arange(self.count).unsqueeze(1)
        last = (at + 1) * extent + self.count - 1
        return torch.floor_divide(at * extent, self.count), torch.floor_divide(last, self.count)

    def table(self, extent):
        first, end = self._bounds(extent)
        positions = first + torch.arange((extent + self.count - 1) // self.count + 1)
        return positions, positions < end, first

    def counted(self, extent):
        first, end = self._bounds(extent)
        return (end - first).squeeze(1)


Axis = Spaced | Adaptive


def _spaced(P, x, rank, kernel_size, stride, padding, dilation, ceil_mode, counts_padding=True) -> list[Axis]:
    axes = [
        Spaced(*numbers, counts_padding, ceil_mode)
        for numbers in zip(
            *(
                _of_every_axis(values, rank)
                for values in (kernel_size, stride or kernel_size, padding, dilation)
            )
        )
    ]
    for axis, extent in zip(axes, x.shape[-rank:]):
        # Where this holds no window begins behind the end, of which torch would drop it.
        if not isinstance(extent, int) and ceil_mode and axis.stride + axis.padding > axis.reach + 1:
            raise Unsupported("pooling in ceil_mode, its windows apart, over an axis whose extent is dynamic")
    return axes


def _of_every_axis(values: list[int], rank: int) -> list[int]:
    return values * rank if len(values) == 1 else values


def _extents(P, x, rank: int) -> list[tuple[int, int]]:
    """Of the pooled axes, the last ones, before and after."""
    out = P.out[0] if isinstance(P.out, (list, tuple)) else P.out
    return list(zip(x.shape[-rank:], out.shape[-rank:]))


def _is_static(extents: tuple) -> bool:
    return all(isinstance(extent, int) for extent in extents)


@dataclass(frozen=True)
class Windows:
    """An axis with what is known of it now: a constant table [count · size] of positions, or None
    for 0, 1, …, and the `count` of windows; or that it has to be computed."""

    axis: Axis
    count: int | None = None
    table: TensorSlot | None = None


def _windows(P, axes: list[Axis], extents, outside) -> list[Windows]:
    """`outside(window, extent)` is what stands for a position that the axis does not have."""
    found = []
    for axis, (extent, count) in zip(axes, extents):
        if _is_static((extent, count)):
            table = _table(P, axis.windows(extent, count), extent, outside)
            found.append(Windows(axis, count, table))
        elif axis == Adaptive(1):
            found.append(Windows(axis, 1))
        else:
            found.append(Windows(axis))
    return found


def _table(P, windows: list[range], extent: int, outside) -> TensorSlot | None:
    widest = max((len(w) for w in windows), default=0)
    positions = []
    for window in windows:
        beyond = outside(window, extent)
        inside = [p if 0 <= p < extent else beyond for p in window]
        positions += inside + [beyond] * (widest - len(inside))
    if positions == list(range(extent)):
        return None
    return P.constant("windows", torch.tensor(positions, dtype=torch.int64))


def _taken(x, axis: int, table, count: int):
    """[…, extent, …] → […, count, k, …]; `axis` is negative and counts the k."""
    if table is None:
        return x.unflatten(axis, (count, x.shape[axis] // count))
    if table.dim() == 1:
        return x.index_select(axis, table).unflatten(axis, (count, table.shape[0] // count))
    return x.index_select(axis, table.reshape(-1)).unflatten(axis, table.shape)


# -- maximum ------------------------------------------------------------------


def _max_pool(x, tables, windows):
    """Values and their positions in the plane of the pooled axes; of equal ones the first."""
    plane = x.shape[-len(windows):]
    index = torch.arange(math.prod(plane), device=x.device).reshape(plane).expand(x.shape)
    for axis in range(-1, -len(windows) - 1, -1):
        table, count = tables[axis], windows[axis].count
        if count is None:
            positions, inside, first = windows[axis].axis.table(x.shape[axis])
            table = torch.where(inside, positions, first)
        x, which = _taken(x, axis, table, count).max(axis)
        index = _taken(index, axis, table, count).gather(axis, which.unsqueeze(axis)).squeeze(axis)
    return x, index


def _first_inside(window: range, extent: int) -> int:
    return next(p for p in window if 0 <= p < extent)


def _lower_max(P, x, axes: list[Axis]):
    if 0 in x.shape:
        raise Unsupported("max pooling of an empty tensor")
    windows = _windows(P, axes, _extents(P, x, len(axes)), _first_inside)
    return P.trace(_max_pool, x, [w.table for w in windows], windows)


def _max_pool_over(rank: int):
    def lower(P, self, kernel_size, stride, padding, dilation, ceil_mode):
        axes = _spaced(P, self, rank, kernel_size, stride, padding, dilation, ceil_mode)
        return _lower_max(P, self, axes)

    return lower


REGISTRY.add(aten.max_pool2d_with_indices.default, _max_pool_over(2))
REGISTRY.add(aten.max_pool3d_with_indices.default, _max_pool_over(3))


@REGISTRY.lower(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(P, self, output_size):
    return _lower_max(P, self, [Adaptive(count) for count in output_size])


# -- average ------------------------------------------------------------------


def _avg_pool(x, tables, windows, sizes, divisor):
    """Sums in float32, as torch has them, divided at the end."""
    total = x.float() if x.is_floating_point() else x
    counted = 1
    for axis, table, window, size in zip(range(-len(windows), 0), tables, windows, sizes):
        if window.count is None:
            extent = x.shape[axis]
            positions, inside, _ = window.axis.table(extent)
            table, size = torch.where(inside, positions, extent), window.axis.counted(extent)
        elif size is None:
            size = x.shape[axis]
        if table is not None:
            # One zero behind the end, for positions in the padding.
            zero = torch.zeros_like(total.narrow(axis, 0, 1))
            total = torch.cat([total, zero], axis)
        total = _taken(total, axis, table, window.count).sum(axis)
        if isinstance(size, torch.Tensor):
            size = size.to(torch.float32).reshape(-1, *[1] * (-axis - 1))
        counted = size * counted
    return (total / (counted if divisor is None else divisor)).to(x.dtype)


def _lower_avg(P, x, axes: list[Axis], divisor: int | None = None):
    if not x.dtype.is_floating_point:
        raise Unsupported(f"average pooling of {x.dtype}: torch has its own rounding there")
    extents = _extents(P, x, len(axes))
    windows = _windows(P, axes, extents, lambda window, extent: extent)
    sizes = [_sizes(P, axis, *pair) for axis, pair in zip(axes, extents)]
    return P.trace(_avg_pool, x, [w.table for w in windows], windows, sizes, divisor)[0]


def _sizes(P, axis: Axis, extent, count) -> int | TensorSlot | None:
    """How many elements each window counts: one number, or a row of them; None if it is dynamic."""
    if not _is_static((extent, count)):
        return None
    sizes = axis.sizes(extent, count)
    if len(set(sizes)) == 1:
        return sizes[0]
    return P.constant("window_sizes", torch.tensor(sizes, dtype=torch.float32))


def _avg_pool_over(rank: int):
    def lower(
        P, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override=None
    ):
        axes = _spaced(
            P, self, rank, kernel_size, stride, padding, [1], ceil_mode, count_include_pad
        )
        if ceil_mode and not all(isinstance(extent, int) for extent in self.shape[-rank:]):
            raise Unsupported("average pooling in ceil_mode over an axis whose extent is dynamic")
        return _lower_avg(P, self, axes, divisor_override)

    return lower


REGISTRY.add(aten.avg_pool1d.default, _avg_pool_over(1))
REGISTRY.add(aten.avg_pool2d.default, _avg_pool_over(2))
REGISTRY.add(aten.avg_pool3d.default, _avg_pool_over(3))


@REGISTRY.lower(
    aten.adaptive_avg_pool1d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
)
def adaptive_avg_pool(P, self, output_size):
    return _lower_avg(P, self, [Adaptive(count) for count in output_size])
