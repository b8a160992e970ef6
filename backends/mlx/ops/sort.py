"""Lowers sort, argsort and topk to `ArgsortNode`, and `mlx::argpartition` to `ArgPartitionNode`.

MLX's sort is ascending and stable. `P` is the `ProgramBuilder`, as in every file of this package.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(aten.sort.default, aten.sort.stable)
def sort(P: Lowering, self, dim, descending, stable=None):
    return _sorted(P, self, dim, descending)


@REGISTRY.lower(aten.argsort.default, aten.argsort.stable)
def argsort(P: Lowering, self, dim, descending, stable=None):
    return _sorted(P, self, dim, descending)[1]


@REGISTRY.lower(aten.topk.default)
def topk(P: Lowering, self, k, dim, largest, sorted):
    if self.ndim == 0 and k != 1:
        raise Unsupported(f"k: got {k} for a 0-d input, expected 1")
    values, index = _sorted(P, self, dim, descending=largest)
    return [_first(P, x, k, dim % self.ndim) for x in (values, index)] if self.ndim else [values, index]


def _sorted(P: Lowering, x, dim, descending):
    """Return the sorted values and their indices.

    A descending sort reverses the axis, sorts in ascending order and reverses the result. This keeps equal elements in
    their original order.
    """
    if x.ndim == 0:
        return [x, P.scalar(0, torch.int64)]
    dim %= x.ndim
    if descending:
        reversed_ = P.emit(ir.FlipNode, x=x, axes=[dim])
        order = P.emit(ir.ArgsortNode, x=reversed_, axis=dim)
        order = P.cast(P.emit(ir.FlipNode, x=order, axes=[dim]), torch.int64)
        last = P.size(x, dim)
        last = last - 1 if isinstance(last, int) else P.emit(ir.SubtractIntNode, a=last, b=1)
        index = P.emit(ir.SubtractNode, a=P.scalar(last, torch.int64), b=order)
    else:
        order = P.emit(ir.ArgsortNode, x=x, axis=dim)
        index = P.cast(order, torch.int64)
    return [P.emit(ir.TakeAlongAxisNode, x=x, indices=index, axis=dim), index]


def _first(P: Lowering, x, count, dim):
    return P.emit(ir.SliceNode, x=x, axis=dim, start=0, stop=count)


@REGISTRY.lower(torch.ops.mlx.argpartition.default)
def argpartition(P: Lowering, x, kth, axis):
    order = P.emit(ir.ArgPartitionNode, x=x, kth=kth, axis=axis)
    return P.cast(order, torch.int64)
