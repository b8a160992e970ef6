"""Key-value caches in mutable buffers: rows written in place, attention over what is held."""

from __future__ import annotations

import torch

from ..builder import dtypes
from ..builder.registry import REGISTRY
from ..builder.rows import add, subtract, write_rows
from ..serialization import ir

_MANY = 1 << 40  # more than any position


@REGISTRY.lower(torch.ops.mlx.cache_update.default)
def cache_update(P, cache, update, start, ring=False):
    return write_rows(P, cache, update, P.item(start), cache.shape[2] if ring else None)


@REGISTRY.lower(torch.ops.mlx.cached_attention.default)
def cached_attention(
    P, query, keys, values, start, scale, first=None, window=None, softcap=None
):
    begin = P.item(start)
    end = add(P, begin, P.size(query, 2))
    rows = end if window is None else _at_most(P, end, keys.shape[2])
    k, v = (P.emit(ir.SliceNode, x=c, axis=2, start=0, stop=rows) for c in (keys, values))
    k, v = (P.cast(c, query.dtype) for c in (k, v))
    if first is None and window is None and softcap is None:
        return P.emit(ir.SdpaNode, q=query, k=k, v=v, scale=scale, causal=True)
    mask = _visible(P, begin, end, rows, keys.shape[2], first, window)
    if softcap is None:
        return P.emit(ir.SdpaNode, q=query, k=k, v=v, scale=scale, mask=mask)
    return _softcapped(P, query, k, v, keys.shape[1], rows, mask, scale, softcap)


def _visible(P, begin, end, rows, capacity, first, window):
    """What each query sees, a bool mask [S, rows], or [B, 1, S, rows] with padding."""

    def compare(op, a, b):
        return P.emit(op, a=a, b=b, dtype=torch.bool)

    def number(value):
        return P.scalar(value, torch.int32)

    asking = P.emit(ir.ExpandDimsNode, x=_range(P, begin, end), axis=1)
    held = _range(P, 0, rows)
    if window is not None:
        last = number(subtract(P, end, 1))
        age = P.emit(ir.SubtractNode, a=last, b=held)
        held = P.emit(ir.SubtractNode, a=last, b=P.emit(ir.RemainderNode, a=age, b=number(capacity)))
    mask = compare(ir.LessEqualNode, held, asking)
    if window is not None:
        before = P.emit(ir.SubtractNode, a=asking, b=number(window))
        mask = compare(ir.LogicalAndNode, mask, compare(ir.GreaterNode, held, before))
    if first is not None:
        first = P.emit(ir.ReshapeNode, x=P.cast(first, torch.int32), shape=[first.shape[0], 1, 1, 1])
        mask = compare(ir.LogicalAndNode, mask, compare(ir.GreaterEqualNode, held, first))
        mask = compare(ir.LogicalOrNode, mask, compare(ir.EqualNode, held, asking))
    return mask


def _softcapped(P, query, k, v, groups, rows, mask, scale, softcap):
    """Attention spelled out: the fused kernel has no cap. Query heads of one group are rows of
    one product, so that no key is repeated."""
    batch, heads, _, size = query.shape
    length = P.size(query, 2)
    stacked = [batch, groups, P.emit(ir.MultiplyIntNode, a=length, b=heads // groups)]

    def reshape(x, *extents):
        return P.emit(ir.ReshapeNode, x=x, shape=list(extents))

    def number(value, dtype=query.dtype):
        return P.scalar(value, dtype)

    q = reshape(query, *stacked, size)
    transposed = P.emit(ir.TransposeNode, x=k, perm=[0, 1, 3, 2])
    scores = reshape(P.emit(ir.AddmmNode, mat1=q, mat2=transposed), batch, heads, length, rows)
    scores = P.emit(ir.MultiplyNode, a=scores, b=number(scale / softcap))
    scores = P.emit(ir.MultiplyNode, a=P.emit(ir.TanhNode, x=scores), b=number(softcap))
    scores = P.emit(ir.WhereNode, condition=mask, x=scores, y=number(-torch.inf), dtype=query.dtype)
    weights = P.emit(ir.SoftmaxNode, x=scores, axis=-1, precise=True)
    out = P.emit(ir.AddmmNode, mat1=reshape(weights, *stacked, rows), mat2=v)
    return reshape(out, batch, heads, length, size)


# Integers of the host ---------------------------------------------------------------------


def _at_most(P, value, bound):
    """min(value, bound) for 0 <= value < 2^40, by the arithmetic that the wire has."""
    times = P.emit(ir.FloorDivideIntNode, a=value, b=bound)
    over = P.emit(ir.FloorDivideIntNode, a=add(P, times, _MANY - 1), b=_MANY)  # 0 or 1
    excess = P.emit(ir.MultiplyIntNode, a=over, b=subtract(P, value, bound))
    return subtract(P, value, excess)


def _range(P, start, stop):
    return P.emit(ir.ARangeNode, start=start, stop=stop, step=1, scalar_type=dtypes.scalar_type(torch.int32),
                  dtype=torch.int32)
