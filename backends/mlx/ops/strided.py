"""Views of a tensor by strides: diagonals, sliding windows, and strides as such."""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY, Unsupported, aten_target
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(P, self, offset, dim1, dim2):
    if not all(isinstance(self.shape[d], int) for d in (dim1, dim2)):
        raise Unsupported("diagonal over an axis whose extent is dynamic")
    return P.trace(_diagonal, self, offset, dim1, dim2)[0]


def _diagonal(x, offset, dim1, dim2):
    """Of the two axes as one, every (columns + 1)th element."""
    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2:]
    count = min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns)
    first = offset if offset >= 0 else -offset * columns
    step = columns + 1
    return x.flatten(-2)[..., first : first + max(count, 0) * step : step]


@REGISTRY.lower(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(P, self, size, stride, storage_offset):
    """The strides are those of the storage, which is known of a tensor that fills its own."""
    source = P.node.args[0]
    val = source.meta["val"]
    copied = torch.Tag.view_copy in getattr(aten_target(source.target), "tags", ())
    if copied or not val.is_contiguous() or val.storage_offset() != 0:
        raise Unsupported("as_strided of a view, whose storage is another tensor's")
    offset = 0 if storage_offset is None else storage_offset
    if not isinstance(offset, int):
        raise Unsupported("as_strided at a dynamic offset: MLX's IR has a number there")
    return P.emit(ir.AsStridedNode, x=self, shape=size, strides=stride, offset=offset)


@REGISTRY.lower(aten.unfold.default, aten.unfold_copy.default)
def unfold(P, self, dimension, size, step):
    if self.ndim == 0:
        raise Unsupported("unfold of a 0-d tensor")
    return P.trace(_unfold, self, dimension % self.ndim, size, step)[0]


def _unfold(x, axis, size, step):
    """The windows of the axis take its place, what is in them goes to the end."""
    count = (x.shape[axis] - size) // step + 1
    start = torch.arange(count, device=x.device).unsqueeze(1) * step
    positions = (start + torch.arange(size, device=x.device)).reshape(-1)
    windows = x.index_select(axis, positions).unflatten(axis, (count, size))
    return windows.movedim(axis + 1, -1)
