"""Lowers `histc` and `histogram` to a scatter-add of ones."""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported

aten = torch.ops.aten


def _outer_edges(x, low, high):
    """Return the edges of the histogram: `low` and `high`, or the extrema of `x` if `low` and `high` are equal.

    If the extrema are equal too, the edges are 1 below and above them.
    """
    if low != high:
        return torch.full((), low, dtype=x.dtype), torch.full((), high, dtype=x.dtype)
    low, high = x.min(), x.max()
    equal = low == high
    return torch.where(equal, low - 1, low), torch.where(equal, high + 1, high)


def _counts(x, bins, low, high):
    """Return the number of elements in each bin. Elements outside of the bins are not counted."""
    x = x.reshape(-1)
    inside = (x >= low) & (x <= high)
    position = torch.where(inside, (x - low) * bins / (high - low), 0)
    index = torch.clamp(position.to(torch.int64), max=bins - 1)
    return torch.zeros(bins, dtype=x.dtype).scatter_add(0, index, inside.to(x.dtype))


def _check(x):
    if x.dtype != torch.float32:
        raise Unsupported(f"{x.dtype} is unsupported; use float32")


@REGISTRY.lower(aten.histc.default)
def histc(P: Lowering, self, bins, min, max):
    _check(self)
    return P.trace(lambda x: _counts(x, bins, *_outer_edges(x, min, max)), self)[0]


@REGISTRY.lower(aten.histogram.bin_ct)
def histogram(P: Lowering, self, bins, range, weight, density):
    _check(self)
    if weight is not None or density:
        raise Unsupported("weight and density are unsupported; divide the counts, or use scatter_add")
    low, high = range or (0, 0)

    def function(x):
        low_edge, high_edge = _outer_edges(x, low, high)
        edges = low_edge + (high_edge - low_edge) * (torch.arange(bins + 1) / bins)
        return [_counts(x, bins, low_edge, high_edge), edges]

    return P.trace(function, self)
