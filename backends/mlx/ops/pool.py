"""Pooling, one axis after the other: gather the windows of an axis, then reduce each.

Windows that tile the axis (global pooling, stride = kernel, adaptive pooling of a multiple) are
a reshape; all others are taken by a constant table of positions.
"""

from __future__ import annotations

import math

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot

aten = torch.ops.aten

# The positions that each output of an axis reads, padding included.
Windows = list[range]


def _spaced(P, x, rank, kernel_size, stride, padding, dilation) -> list[Windows]:
    extents = _extents(P, x, rank)
    kernel, stride, padding, dilation = (
        _of_every_axis(values, rank)
        for values in (kernel_size, stride or kernel_size, padding, dilation)
    )
    return [
        [range(o * s - p, o * s - p + k * d, d) for o in range(out)]
        for (_, out), k, s, p, d in zip(extents, kernel, stride, padding, dilation)
    ]


def _of_every_axis(values: list[int], rank: int) -> list[int]:
    return values * rank if len(values) == 1 else values


def _adaptive(P, x, rank: int) -> list[Windows]:
    return [
        [range(o * extent // out, -(-(o + 1) * extent // out)) for o in range(out)]
        for extent, out in _extents(P, x, rank)
    ]


def _extents(P, x, rank: int) -> list[tuple[int, int]]:
    """Of the pooled axes, the last ones, before and after."""
    out = P.out[0] if isinstance(P.out, (list, tuple)) else P.out
    pairs = list(zip(x.shape[-rank:], out.shape[-rank:]))
    for axis, pair in enumerate(pairs, start=-rank):
        if not all(isinstance(extent, int) for extent in pair):
            raise Unsupported(f"pooling over axis {axis}, whose extent is dynamic")
    return pairs


def _table(P, windows: Windows, extent: int, outside) -> TensorSlot | None:
    """Positions [out · k], or None where they are 0, 1, …; `outside(window)` is what stands
    for a position that the axis does not have."""
    widest = max((len(w) for w in windows), default=0)
    positions = []
    for window in windows:
        inside = [p if 0 <= p < extent else outside(window) for p in window]
        positions += inside + [outside(window)] * (widest - len(inside))
    if positions == list(range(extent)):
        return None
    data = torch.tensor(positions, dtype=torch.int64)
    return P.constant("windows", lambda: data, like=data)


def _windows(x, axis: int, table, count: int):
    """[…, extent, …] → […, count, k, …]; `axis` is negative and counts the k."""
    x = x if table is None else x.index_select(axis, table)
    return x.unflatten(axis, (count, x.shape[axis] // count))


# -- maximum ------------------------------------------------------------------


def _max_pool(x, tables, counts):
    """Values and their positions in the plane of the pooled axes; of equal ones the first."""
    plane = x.shape[-len(tables):]
    index = torch.arange(math.prod(plane), device=x.device).reshape(plane).expand(x.shape)
    for axis in range(-1, -len(tables) - 1, -1):
        table, count = tables[axis], counts[axis]
        x, which = _windows(x, axis, table, count).max(axis)
        index = _windows(index, axis, table, count).gather(axis, which.unsqueeze(axis)).squeeze(axis)
    return x, index


def _lower_max(P, x, windows: list[Windows]):
    if 0 in x.shape:
        raise Unsupported("max pooling of an empty tensor")

    def first_inside(extent):
        return lambda window: next(p for p in window if 0 <= p < extent)

    extents = x.shape[-len(windows):]
    tables = [_table(P, w, e, first_inside(e)) for w, e in zip(windows, extents)]
    return P.trace(_max_pool, x, tables, [len(w) for w in windows])


def _max_pool_over(rank: int):
    def lower(P, self, kernel_size, stride, padding, dilation, ceil_mode):
        # ceil_mode only decides how many windows there are, which the result's shape says.
        return _lower_max(P, self, _spaced(P, self, rank, kernel_size, stride, padding, dilation))

    return lower


REGISTRY.add(aten.max_pool2d_with_indices.default, _max_pool_over(2))
REGISTRY.add(aten.max_pool3d_with_indices.default, _max_pool_over(3))


@REGISTRY.lower(aten.adaptive_max_pool2d.default, aten.adaptive_max_pool3d.default)
def adaptive_max_pool(P, self, output_size):
    return _lower_max(P, self, _adaptive(P, self, len(output_size)))


# -- average ------------------------------------------------------------------


def _avg_pool(x, tables, counts, divisor):
    """Sums in float32, as torch has them, divided at the end."""
    total = x.float() if x.is_floating_point() else x
    for axis, (table, count) in zip(range(-len(tables), 0), zip(tables, counts)):
        if table is not None:
            # One zero behind the end, for positions in the padding.
            zero = torch.zeros_like(total.narrow(axis, 0, 1))
            total = torch.cat([total, zero], axis)
        total = _windows(total, axis, table, count).sum(axis)
    return (total / divisor).to(x.dtype)


def _lower_avg(P, x, windows: list[Windows], sizes: list[list[int]], divisor: int | None = None):
    if not x.dtype.is_floating_point:
        raise Unsupported(f"average pooling of {x.dtype}: torch has its own rounding there")
    extents = x.shape[-len(windows):]
    tables = [_table(P, w, e, lambda _, e=e: e) for w, e in zip(windows, extents)]
    return P.trace(_avg_pool, x, tables, [len(w) for w in windows], _divisor(P, sizes, divisor))[0]


def _divisor(P, sizes: list[list[int]], override: int | None):
    """How many elements each window counts: one number, or a plane of them."""
    if override is not None:
        return override
    if all(len(set(axis)) == 1 for axis in sizes):
        return math.prod(axis[0] for axis in sizes)
    grid = torch.meshgrid(*(torch.tensor(axis, dtype=torch.float32) for axis in sizes), indexing="ij")
    data = torch.stack(grid).prod(0)
    return P.constant("window_sizes", lambda: data, like=data)


def _avg_pool_over(rank: int):
    def lower(
        P, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override=None
    ):
        windows = _spaced(P, self, rank, kernel_size, stride, padding, [1])
        paddings = _of_every_axis(padding, rank)
        sizes = [
            [_size(w, extent, p if count_include_pad else 0) for w in axis]
            for axis, extent, p in zip(windows, self.shape[-rank:], paddings)
        ]
        return _lower_avg(P, self, windows, sizes, divisor_override)

    return lower


def _size(window: range, extent: int, padding: int) -> int:
    """What counts: a window of ceil_mode may reach beyond the padding too."""
    return min(window.stop, extent + padding) - max(window.start, -padding)


REGISTRY.add(aten.avg_pool1d.default, _avg_pool_over(1))
REGISTRY.add(aten.avg_pool2d.default, _avg_pool_over(2))
REGISTRY.add(aten.avg_pool3d.default, _avg_pool_over(3))


@REGISTRY.lower(
    aten.adaptive_avg_pool1d.default,
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool3d.default,
)
def adaptive_avg_pool(P, self, output_size):
    windows = _adaptive(P, self, len(output_size))
    return _lower_avg(P, self, windows, [[len(w) for w in axis] for axis in windows])
