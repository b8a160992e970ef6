"""Reductions into places that a tensor names.

MLX's IR scatters sums, and means are made of them. What is left goes through a sort: values
with the same place become neighbours, and are combined in steps of 1, 2, 4, ….
"""

from __future__ import annotations

import math

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir

aten = torch.ops.aten

SUMS = ("sum", "mean")
COMBINE = {"prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum}


@REGISTRY.lower(aten.scatter_add.default)
def scatter_add(P, self, dim, index, src):
    if self.ndim == 0:
        return P.trace(_scatter_add_0d, self, index, src)[0]
    x, updates = self, P.cast(src, self.dtype)
    if list(src.shape) != list(index.shape):
        updates = P.trace(_corner, updates, index)[0]
    return P.emit(ir.ScatterAddNode, x=x, indices=index, updates=updates, axis=dim % self.ndim)


def _scatter_add_0d(x, index, src):
    return x + src.sum().to(x.dtype) if index.numel() else x


def _corner(src, index):
    """The part of `src` that `index` speaks of."""
    for axis, extent in enumerate(index.shape):
        src = src.narrow(axis, 0, extent)
    return src


@REGISTRY.lower(aten.scatter_reduce.two)
def scatter_reduce(P, self, dim, index, src, reduce, include_self):
    if 0 in index.shape:
        return self
    if reduce in SUMS:
        return P.trace(_sum, self, dim, index, src, reduce == "mean", include_self)[0]
    if not all(isinstance(extent, int) for extent in index.shape):
        raise Unsupported(f"scatter by {reduce} of a dynamic number of values")
    if self.dtype == torch.bool:
        raise Unsupported(f"scatter by {reduce} of truth values")
    return P.trace(_segments, self, dim, index, src, COMBINE[reduce], include_self)[0]


@REGISTRY.lower(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(P, self, dim, index, reduce, src=None, value=None):
    if src is None:
        src = P.full([P.size(index, axis) for axis in range(index.ndim)], value, self.dtype)
        src.shape = index.shape
    return scatter_reduce(P, self, dim, index, src, {"add": "sum", "multiply": "prod"}[reduce], True)


@REGISTRY.lower(aten.index_reduce.default)
def index_reduce(P, self, dim, index, source, reduce, include_self):
    if self.ndim == 0:
        raise Unsupported("index_reduce to a 0-d tensor")
    (places,) = P.trace(_every, index, source, dim % self.ndim)
    return scatter_reduce(P, self, dim, places, source, reduce, include_self)


@REGISTRY.lower(aten.index_add.default)
def index_add(P, self, dim, index, source, alpha):
    if self.ndim == 0:
        raise Unsupported("index_add to a 0-d tensor")
    return P.trace(_index_add, self, dim % self.ndim, index, source, alpha)[0]


def _index_add(x, dim, index, source, alpha):
    source = source if alpha == 1 else source * alpha
    return x.scatter_add(dim, _every(index, source, dim), source)


def _every(index, source, dim):
    """An index along `dim`, as one for every element of `source`."""
    shape = [-1 if axis == dim else 1 for axis in range(source.dim())]
    return index.to(torch.int64).reshape(shape).expand(source.shape)


def _sum(x, dim, index, src, mean, include_self):
    src = _corner(src, index).to(x.dtype)
    ones = torch.ones_like(src, dtype=torch.int32)
    hits = torch.zeros_like(x, dtype=torch.int32).scatter_add(dim, index, ones)
    kept = x if include_self else torch.where(hits > 0, torch.zeros_like(x), x)
    total = kept.scatter_add(dim, index, src)
    if not mean:
        return total
    count = hits + 1 if include_self else torch.clamp(hits, min=1)
    if x.is_floating_point():
        return total / count
    return torch.div(total, count, rounding_mode="floor").to(x.dtype)


def _segments(x, dim, index, src, combine, include_self):
    """What is written to one place is a segment of the sorted places; its last element ends up
    with all of it, and is the one that is written."""
    flat, size = x.reshape(-1), math.prod(x.shape)
    places = _linear(x, dim % max(x.dim(), 1), index).reshape(-1)
    order = torch.argsort(places, stable=True)
    places, values = places[order], _corner(src, index).to(x.dtype).reshape(-1)[order]
    step = 1
    while step < places.shape[0]:
        together = places[step:] == places[:-step]
        combined = torch.where(together, combine(values[step:], values[:-step]), values[step:])
        values = torch.cat([values[:step], combined])
        step *= 2
    if include_self:
        values = combine(values, flat[places])
    ends = torch.ones_like(places[:1], dtype=torch.bool)
    last = torch.cat([places[1:] != places[:-1], ends])
    # All others go to one place behind the end, which is cut off again.
    flat = torch.cat([flat, torch.zeros_like(flat[:1])])
    flat = flat.index_copy(0, torch.where(last, places, size), values)
    return flat[:size].reshape(x.shape)


def _linear(x, dim, index):
    """Where in the flattened `x` each element of `index` points."""
    linear = 0
    for axis, extent in enumerate(x.shape):
        if axis == dim:
            position = index
        else:
            shape = [-1 if a == axis else 1 for a in range(x.dim())]
            position = torch.arange(index.shape[axis], device=x.device).reshape(shape)
        linear = linear * extent + position
    return linear if x.dim() else index * 0
