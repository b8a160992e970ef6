"""Strided views: `as_strided` is an `AsStridedNode`; diagonal and unfold are slices and gathers."""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Node

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported, aten_target
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(P: Lowering, self, offset, dim1, dim2):
    if not all(isinstance(self.shape[d], int) for d in (dim1, dim2)):
        raise Unsupported("the diagonal of a dynamic dimension is unsupported")
    return P.trace(_diagonal, self, offset, dim1, dim2)[0]


def _diagonal(x, offset, dim1, dim2):
    """Flatten the axes `dim1` and `dim2` to one axis and take every (columns + 1)th element."""
    x = x.movedim((dim1, dim2), (-2, -1))
    rows, columns = x.shape[-2:]
    length = min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns)
    first = offset if offset >= 0 else -offset * columns
    step = columns + 1
    return x.flatten(-2)[..., first : first + max(length, 0) * step : step]


@REGISTRY.lower(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(P: Lowering, self, size, stride, storage_offset):
    """Lower `as_strided` of an operand that is not a view.

    `size` and `stride` index the storage that underlies the operand. If the operand is a view, or a part of a tensor,
    the graph does not tell how that storage is laid out.
    """
    val = P.node.args[0].meta["val"]
    if _is_view(P.node.args[0]) or not val.is_contiguous() or val.storage_offset() != 0:
        raise Unsupported(
            "as_strided of a view is unsupported; copy the view with .clone(memory_format=torch.contiguous_format) "
            "and use the strides of the copy"
        )
    offset = 0 if storage_offset is None else storage_offset
    if not isinstance(offset, int):
        raise Unsupported("storage_offset: a dynamic value is unsupported; slice the input instead")
    if all(isinstance(n, int) for n in (*self.shape, *size, *stride)) and 0 not in size:
        last = offset + sum((n - 1) * step for n, step in zip(size, stride))
        if last >= math.prod(self.shape):
            raise Unsupported(f"element {last} lies outside of the input, which has {math.prod(self.shape)} elements")
    return P.emit(ir.AsStridedNode, x=self, shape=size, strides=stride, offset=offset)


def _is_view(node: Node) -> bool:
    """Whether the result of `node` is a view of another tensor in eager torch."""
    if node.target is operator.getitem:  # a part, as of `split`
        return _is_view(node.args[0])
    target = aten_target(node.target)
    returns = target._schema.returns if isinstance(target, torch._ops.OpOverload) else ()
    return torch.Tag.view_copy in getattr(target, "tags", ()) or any(r.alias_info is not None for r in returns)


@REGISTRY.lower(aten.unfold.default, aten.unfold_copy.default)
def unfold(P: Lowering, self, dimension, size, step):
    if self.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    return P.trace(_unfold, self, dimension % self.ndim, size, step)[0]


def _unfold(x, axis, size, step):
    """Return the windows of `size` elements along an axis: […, extent, …] → […, windows, …, size]."""
    count = (x.shape[axis] - size) // step + 1
    start = torch.arange(count, device=x.device).unsqueeze(1) * step
    index = (start + torch.arange(size, device=x.device)).reshape(-1)
    windows = x.index_select(axis, index).unflatten(axis, (count, size))
    return windows.movedim(axis + 1, -1)
