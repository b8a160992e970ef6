"""Writes that combine values with the same index: scatter_add, scatter_reduce, index_add, index_reduce.

A sum is a `ScatterAddNode`, and a mean is a sum divided by a count. For products and extrema, the values are sorted by
destination, so that values for the same element are neighbours, and a scan combines neighbours whose destinations are
equal.
"""

from __future__ import annotations

import math

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..extents import bounds, is_empty
from .lib.flat_index import flat_element_index
from .lib.scan import inclusive_scan
from .lib.scattered_sum import add_scattered, leading_part

aten = torch.ops.aten

SUMS = ("sum", "mean")
COMBINE = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}


@REGISTRY.lower(aten.scatter_add.default)
def scatter_add(P: Lowering, self, dim, index, src):
    return add_scattered(P, self, dim, index, src)


@REGISTRY.lower(aten.scatter_reduce.two)
def scatter_reduce(P: Lowering, self, dim, index, src, reduce, include_self):
    if is_empty(index.shape):
        return self
    if reduce in SUMS:
        return P.trace(_sum_or_mean, self, dim, index, src, reduce == "mean", include_self)[0]
    if self.dtype == torch.bool:
        raise Unsupported(f"reduce={reduce!r} of bool values is unsupported; cast them to an integer dtype")
    _, most = bounds(index.shape[dim]) if index.ndim else (0, 1)
    return P.trace(_sorted_reduce, self, dim, index, src, COMBINE[reduce], include_self, most)[0]


@REGISTRY.lower(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(P: Lowering, self, dim, index, reduce, src=None, value=None):
    if src is None:
        src = P.full([P.size(index, axis) for axis in range(index.ndim)], value, self.dtype)
    return scatter_reduce(P, self, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce], True)


@REGISTRY.lower(aten.index_reduce.default)
def index_reduce(P: Lowering, self, dim, index, source, reduce, include_self):
    if self.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    (elementwise,) = P.trace(_expand_index, index, source, dim % self.ndim)
    return scatter_reduce(P, self, dim, elementwise, source, reduce, include_self)


@REGISTRY.lower(aten.index_add.default)
def index_add(P: Lowering, self, dim, index, source, alpha):
    if self.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    return P.trace(_index_add, self, dim % self.ndim, index, source, alpha)[0]


def _index_add(x, dim, index, source, alpha):
    source = source if alpha == 1 else (source * alpha).to(x.dtype)  # bools times an integer are integers
    return x.scatter_add(dim, _expand_index(index, source, dim), source)


def _expand_index(index, source, dim):
    """Expand a 1-d index along `dim` to the shape of `source`, so that every element has its own index."""
    shape = [-1 if axis == dim else 1 for axis in range(source.dim())]
    return index.to(torch.int64).reshape(shape).expand(source.shape)


def _sum_or_mean(x, dim, index, src, mean, include_self):
    src = leading_part(src, index).to(x.dtype)
    ones = torch.ones_like(src, dtype=torch.int32)
    written = torch.zeros_like(x, dtype=torch.int32).scatter_add(dim, index, ones)
    initial = x if include_self else torch.where(written > 0, torch.zeros_like(x), x)
    total = initial.scatter_add(dim, index, src)
    if not mean:
        return total
    count = written + 1 if include_self else torch.clamp(written, min=1)
    if x.is_floating_point():
        return total / count
    return torch.div(total, count, rounding_mode="floor").to(x.dtype)


def _sorted_reduce(x, dim, index, src, combine, include_self, most):
    """Reduce with `combine`, which is associative and commutative.

    The values are sorted by destination. After the scan, the last value of each run of equal destinations is the
    reduction of the whole run. A run has at most `most` values; None stands for any number.
    """
    flat, size = x.reshape(-1), math.prod(x.shape)
    destination = flat_element_index(x, dim % max(x.dim(), 1), index).reshape(-1)
    order = torch.argsort(destination, stable=True)
    destination, values = destination[order], leading_part(src, index).to(x.dtype).reshape(-1)[order]

    def combine_run(earlier, later):
        (d, x), (e, y) = earlier, later
        return [e, torch.where(d == e, combine(x, y), y)]

    _, values = inclusive_scan(combine_run, 0, destination, values, most=most)
    if include_self:
        values = combine(values, flat[destination])
    count = destination.shape[0]
    is_last = (torch.roll(destination, -1) != destination) | (torch.arange(count) == count - 1)
    # The values that are not the last of their run are written to an extra element at the end, which is dropped.
    flat = torch.cat([flat, flat.new_zeros(1)])
    flat = flat.index_copy(0, torch.where(is_last, destination, size), values)
    return flat[:size].reshape(x.shape)
