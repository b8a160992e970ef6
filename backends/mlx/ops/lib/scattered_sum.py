"""Sums of values that are written to elements with an index."""

from __future__ import annotations

from ...builder.lowering import Lowering
from ...extents import is_same_shape
from ...serialization import ir


def add_scattered(P: Lowering, x, dim, index, src):
    """Lower `x.scatter_add(dim, index, src)`."""
    if x.ndim == 0:
        return P.trace(_scatter_add_0d, x, index, src)[0]
    updates = P.cast(src, x.dtype)
    if not is_same_shape(src.shape, index.shape):
        updates = P.trace(leading_part, updates, index)[0]
    return P.emit(ir.ScatterAddNode, x=x, indices=index, updates=updates, axis=dim % x.ndim)


def _scatter_add_0d(x, index, src):
    return x + src.sum().to(x.dtype) if index.numel() else x


def leading_part(src, index):
    """Return the part of `src` that torch reads: its leading elements, in the shape of `index`."""
    for axis, extent in enumerate(index.shape):
        src = src.narrow(axis, 0, extent)
    return src
