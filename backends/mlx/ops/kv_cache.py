"""Lowers `mlx::cache_update` and `mlx::cached_attention`: KV caches in mutable buffers.

An update of the cache is one `SliceUpdateNode`, or two if the positions may wrap around a ring buffer. The update is
done in place where possible. Attention is an `SdpaNode` over the positions that the cache holds, or a sequence of
matrix products and a softmax if the scores are soft-capped.
"""

from __future__ import annotations

import torch

from ..builder import dtypes
from ..builder.cache_write import add, subtract, write_cache
from ..builder.registry import REGISTRY
from ..serialization import ir

_POSITION_LIMIT = 1 << 40  # larger than any position


@REGISTRY.lower(torch.ops.mlx.cache_update.default)
def cache_update(P, cache, update, start, ring=False):
    return write_cache(P, cache, update, P.item(start), cache.shape[2] if ring else None)


@REGISTRY.lower(torch.ops.mlx.cached_attention.default)
def cached_attention(
    P, query, keys, values, start, scale, first=None, window=None, softcap=None
):
    begin = P.item(start)
    end = add(P, begin, P.size(query, 2))
    capacity = keys.shape[2]
    num_held = end if window is None else _minimum(P, end, capacity)
    k, v = (P.emit(ir.SliceNode, x=c, axis=2, start=0, stop=num_held) for c in (keys, values))
    k, v = (P.cast(c, query.dtype) for c in (k, v))
    if first is None and window is None and softcap is None:
        return P.emit(ir.SdpaNode, q=query, k=k, v=v, scale=scale, causal=True)
    mask = _attention_mask(P, begin, end, num_held, capacity, first, window)
    if softcap is None:
        return P.emit(ir.SdpaNode, q=query, k=k, v=v, scale=scale, mask=mask)
    return _softcapped_attention(P, query, k, v, keys.shape[1], num_held, mask, scale, softcap)


def _attention_mask(P, begin, end, num_held, capacity, first_positions, window):
    """Returns a bool mask with the cache entries to which each query attends.

    The mask is [S, num_held], or [B, 1, S, num_held] with `first_positions`. The queries have the positions
    [begin, end). The mask covers the first `num_held` entries of the cache. With a `window`, the cache is a ring
    buffer, and a query attends to the last `window` positions, including the position of the query. `first_positions`
    [B] has the first position of each sequence; earlier positions are padding. It is None if there is no padding.
    """

    def compare(op, a, b):
        return P.emit(op, a=a, b=b, dtype=torch.bool)

    def number(value):
        return P.scalar(value, torch.int32)

    query_at = P.emit(ir.ExpandDimsNode, x=_range(P, begin, end), axis=1)
    entry = _range(P, 0, num_held)
    if window is None:
        key_at = entry
    else:
        # Entry i of a ring buffer holds the latest position p <= last with p % capacity == i.
        last = number(subtract(P, end, 1))
        distance = P.emit(ir.SubtractNode, a=last, b=entry)
        age = P.emit(ir.RemainderNode, a=distance, b=number(capacity))
        key_at = P.emit(ir.SubtractNode, a=last, b=age)
    mask = compare(ir.LessEqualNode, key_at, query_at)
    if window is not None:
        before = P.emit(ir.SubtractNode, a=query_at, b=number(window))
        mask = compare(ir.LogicalAndNode, mask, compare(ir.GreaterNode, key_at, before))
    if first_positions is not None:
        shape = [first_positions.shape[0], 1, 1, 1]
        first_at = P.emit(ir.ReshapeNode, x=P.cast(first_positions, torch.int32), shape=shape)
        mask = compare(ir.LogicalAndNode, mask, compare(ir.GreaterEqualNode, key_at, first_at))
        # A query in the padding attends to itself, so that its softmax is defined.
        mask = compare(ir.LogicalOrNode, mask, compare(ir.EqualNode, key_at, query_at))
    return mask


def _softcapped_attention(P, query, k, v, kv_heads, num_held, mask, scale, softcap):
    """Returns attention with the scores `softcap * tanh(score / softcap)`, which MLX's fused kernel does not support.

    The query heads that share a key head are stacked in one matrix, so that the keys need not be repeated.
    """
    batch, heads, _, size = query.shape
    length = P.size(query, 2)
    stacked = [batch, kv_heads, P.emit(ir.MultiplyIntNode, a=length, b=heads // kv_heads)]

    def reshape(x, *extents):
        return P.emit(ir.ReshapeNode, x=x, shape=list(extents))

    def number(value, dtype=query.dtype):
        return P.scalar(value, dtype)

    q = reshape(query, *stacked, size)
    transposed = P.emit(ir.TransposeNode, x=k, perm=[0, 1, 3, 2])
    scores = reshape(P.emit(ir.AddmmNode, mat1=q, mat2=transposed), batch, heads, length, num_held)
    scores = P.emit(ir.MultiplyNode, a=scores, b=number(scale / softcap))
    scores = P.emit(ir.MultiplyNode, a=P.emit(ir.TanhNode, x=scores), b=number(softcap))
    scores = P.emit(ir.WhereNode, condition=mask, x=scores, y=number(-torch.inf), dtype=query.dtype)
    weights = P.emit(ir.SoftmaxNode, x=scores, axis=-1, precise=True)
    out = P.emit(ir.AddmmNode, mat1=reshape(weights, *stacked, num_held), mat2=v)
    return reshape(out, batch, heads, length, size)


# -- integers on the host -----------------------------------------------------


def _minimum(P, value, bound):
    """Returns min(value, bound) for 0 <= value < 2^40. The IR has no instruction for the minimum of host integers."""
    quotient = P.emit(ir.FloorDivideIntNode, a=value, b=bound)
    # ceil(quotient / _POSITION_LIMIT): 1 if value >= bound, else 0.
    reaches_bound = P.emit(ir.FloorDivideIntNode, a=add(P, quotient, _POSITION_LIMIT - 1), b=_POSITION_LIMIT)
    excess = P.emit(ir.MultiplyIntNode, a=reaches_bound, b=subtract(P, value, bound))
    return subtract(P, value, excess)


def _range(P, begin, end):
    return P.emit(ir.ARangeNode, start=begin, stop=end, step=1, scalar_type=dtypes.scalar_type(torch.int32),
                  dtype=torch.int32)
