"""Reads by index (embedding, gather, index_select, x[i]) and writes of whole slices (index_copy, slice_scatter).

The IR nodes of reads are `TakeNode` and `TakeAlongAxisNode`; those of writes are `IndexCopyNode` and `SliceUpdateNode`.
A write into a buffer happens in place if nothing reads the old value later. Writes of single elements (scatter,
index_put, masked_scatter) are in `scatter.py`.
"""

from __future__ import annotations

import functools

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot
from ..extents import is_same_shape
from ..serialization import ir
from .lib.flat_index import flat_index

aten = torch.ops.aten


@REGISTRY.lower(aten.embedding.default)
def embedding(P: Lowering, weight, indices, padding_idx, scale_grad_by_freq, sparse):
    return P.emit(ir.TakeNode, x=weight, index=indices, axis=0)


@REGISTRY.lower(aten.index_select.default)
def index_select(P: Lowering, self, dim, index):
    if self.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    if index.ndim == 0:  # torch keeps the axis, as for an index of shape [1]
        index = P.emit(ir.ExpandDimsNode, x=index, axis=0)
    return P.emit(ir.TakeNode, x=self, index=index, axis=dim % self.ndim)


@REGISTRY.lower(aten.gather.default)
def gather(P: Lowering, self, dim, index, sparse_grad):
    if self.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    dim %= self.ndim
    x = self
    # Along the axes other than `dim`, torch allows an `index` that is smaller than `self` and reads the leading part of
    # `self`. MLX requires equal extents along these axes, so `self` is sliced.
    for axis in range(self.ndim):
        if axis != dim and not is_same_shape([x.shape[axis]], [index.shape[axis]]):
            part = TensorSlot(x.dtype, (*x.shape[:axis], index.shape[axis], *x.shape[axis + 1 :]))
            x = P.emit(ir.SliceNode, x=x, axis=axis, start=0, stop=P.size(index, axis), out=part)
    return P.emit(ir.TakeAlongAxisNode, x=x, indices=index, axis=dim)


@REGISTRY.lower(aten.index.Tensor)
def index(P: Lowering, self, indices):
    used = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if any(i.dtype == torch.bool for _, i in used):
        raise Unsupported("a bool mask as index gives a result whose shape depends on the data; use torch.where")
    axes = [axis for axis, _ in used]
    if len(used) == 1:
        return P.emit(ir.TakeNode, x=self, index=used[0][1], axis=axes[0])
    if axes != list(range(axes[0], axes[0] + len(axes))):
        # For axes that are not adjacent, torch moves the axes of the index to the front.
        perm = axes + [a for a in range(self.ndim) if a not in axes]
        self, axes = P.emit(ir.TransposeNode, x=self, perm=perm), list(range(len(axes)))
    (flat,) = P.trace(flat_index, self, axes, [i for _, i in used])
    shape = [P.size(self, a) for a in range(self.ndim)]
    indexed = slice(axes[0], axes[-1] + 1)
    # A size of -1 would be ambiguous if another axis is empty.
    shape[indexed] = [functools.reduce(lambda a, b: _times(P, a, b), shape[indexed])]
    return P.emit(ir.TakeNode, x=P.emit(ir.ReshapeNode, x=self, shape=shape), index=flat, axis=axes[0])


def _times(P: Lowering, a, b):
    """Return the product of two sizes."""
    return a * b if isinstance(a, int) and isinstance(b, int) else P.emit(ir.MultiplyIntNode, a=a, b=b)


@REGISTRY.lower(aten.index_copy.default)
def index_copy(P: Lowering, self, dim, index, source):
    if self.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    return P.emit(
        ir.IndexCopyNode,
        dst=self,
        update=source,
        indices=index if index.ndim else P.emit(ir.ExpandDimsNode, x=index, axis=0),
        axis=dim % self.ndim,
        **_in_place(P, self),
    )


@REGISTRY.lower(aten.slice_scatter.default)
def slice_scatter(P: Lowering, self, src, dim, start, end, step):
    dim %= self.ndim
    extent = P.size(self, dim)
    start = 0 if start is None else start
    end = extent if end is None or isinstance(end, int) and end > 2**31 - 1 else end
    return P.emit(
        ir.SliceUpdateNode,
        dst=self,
        update=P.cast(src, self.dtype),
        axis=dim,
        start=start,
        stop=end,
        step=step,
        **_in_place(P, self),
    )


@REGISTRY.lower(aten.select_scatter.default)
def select_scatter(P: Lowering, self, src, dim, index):
    dim %= self.ndim
    if not isinstance(index, int) or not isinstance(self.shape[dim], int):
        raise Unsupported("a dynamic index or extent is unsupported; use index_copy with an index tensor")
    start = index % self.shape[dim]
    update = P.emit(ir.ExpandDimsNode, x=P.cast(src, self.dtype), axis=dim)
    return P.emit(
        ir.SliceUpdateNode, dst=self, update=update, axis=dim, start=start, stop=start + 1, **_in_place(P, self)
    )


def _in_place(P: Lowering, buffer) -> dict:
    """Return the field `out` for an update of `buffer` in place, or no field if the update may not be in place."""
    target = P.in_place_target(buffer)
    return {} if target is None else {"out": target}
