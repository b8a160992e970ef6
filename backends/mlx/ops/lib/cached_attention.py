"""Emits attention over the rows of a KV cache. `FloatCache` in `ops/kv_cache.py` says what a cache has to provide.

`P` is the `Lowering`. In shapes, H is the number of query heads, S of queries and D the size of a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...builder import dtypes
from ...builder.lowering import Lowering
from ...serialization import ir
from .cache_write import add, part_of_row, subtract


@dataclass(frozen=True)
class ScoreSettings:
    """How the attention scores of a query are computed. `mlx::cached_attention` explains the fields."""

    scale: float
    window: int | None
    softcap: float | None
    blocks: bool
    sinks: Any | None
    slopes: Any | None

    @property
    def is_fused(self) -> bool:
        """Whether an attention node supports these settings."""
        return self.softcap is None and self.sinks is None


# -- rows -----------------------------------------------------------------------


def places_of_rows(P: Lowering, x, start, row, rows, capacity, is_ring) -> list[tuple]:
    """Return, for each row, the position of its first element in `x` [1, H, S, D] and `row_begin`.

    If there are several rows, row i has the element x[:, :, i]; otherwise all elements belong to the row. `row_begin`
    is the index of the row's position 0 on axis 2 of the cache. It is None for a cache with one row.
    `mlx::cached_attention` explains `start`, `row` and `rows`. A row has `capacity` positions. `is_ring` says whether
    it is a ring buffer, which accepts any position.
    """
    if row is None:
        position = P.item(start)
        return [(position if is_ring else _refused_beyond(P, position, capacity), None)]
    row_begins = [P.emit(ir.MultiplyIntNode, a=r, b=capacity) for r in _checked(P, row, rows)]
    positions = [P.item(s) for s in _elements(P, start)] if is_ring else _checked(P, start, capacity)
    if len(row_begins) == 1 and not is_ring:
        positions = [_checked_begin(P, positions[0], P.size(x, 2), capacity)]
    return list(zip(positions, row_begins, strict=True))


def _elements(P: Lowering, x):
    """Return the elements of `x` [N], as tensors of one element."""
    count = x.shape[0]
    return [x] if count == 1 else [P.emit(ir.TakeNode, x=x, index=index, axis=0) for index in range(count)]


def _checked(P: Lowering, numbers, bound):
    """Return the elements of `numbers` [N] as host integers. At run time, an element outside [0, bound) is an error.

    Without the check, a position beyond the end of a row would be a position of the next row.
    """
    found = P.emit(ir.GatherNode, x=_range(P, 0, bound), indices=[numbers], axes=[0], slice_sizes=[1])
    return [P.item(number) for number in _elements(P, found)]


def _checked_begin(P: Lowering, begin, length, capacity):
    """Return `begin`. At run time, it is an error if `begin + length` is greater than `capacity`."""
    if length == 1:
        return begin
    distance = subtract(P, length, 1)
    last = P.emit(ir.TakeNode, x=_range(P, 0, capacity), index=add(P, begin, distance), axis=0)
    return subtract(P, P.item(last), distance)


def _refused_beyond(P: Lowering, position, capacity):
    """Return `position`. At run time, it is an error if the position is outside of a cache of `capacity` positions.

    Without the check, a write of one position beyond the end would write nothing, without an error. The error is a
    division by zero, in this runtime and in ExecuTorch's own MLX delegate. All caches of a program share the check.
    """
    quotient = P.emit(ir.FloorDivideIntNode, a=position, b=capacity)  # 0 if the position is inside
    distance = P.emit(ir.MultiplyIntNode, a=quotient, b=quotient)
    is_inside = P.emit(ir.FloorDivideIntNode, a=1, b=add(P, distance, 1))  # 1 or 0
    return P.emit(ir.FloorDivideIntNode, a=position, b=is_inside)


# -- attention ------------------------------------------------------------------


@dataclass(frozen=True)
class HeldKeys:
    """What the queries of a row attend to: the indices [first, stop) of axis 2 of a cache.

    `count` is stop - first. The mask is None if each query attends to all positions up to its own.
    """

    first: Any
    stop: Any
    count: Any
    mask: Any | None


def attend_rows(P: Lowering, query, cache, start, row, rows, settings: ScoreSettings):
    """Return the attention of `query` over `cache`. `mlx::cached_attention` explains `start`, `row` and `rows`."""
    capacity = cache.length // rows
    places = places_of_rows(P, query, start, row, rows, capacity, settings.window is not None)
    length = P.size(query, 2) if len(places) == 1 else 1
    held = [_held_keys(P, length, query.dtype, *place, capacity, settings) for place in places]  # type: ignore[call-arg]
    if len(held) == 1:
        return _attention(P, query, cache, held[0], settings)

    if settings.is_fused and (out := cache.attend_rows(P, query, held, settings.scale)) is not None:
        return out
    out = [_attention(P, part_of_row(P, query, i), cache, keys, settings) for i, keys in enumerate(held)]
    return P.emit(ir.ConcatenateNode, tensors=out, axis=2)


def _held_keys(P: Lowering, length, dtype, begin, row_begin, capacity, settings: ScoreSettings) -> HeldKeys:
    """Return what `length` queries of `dtype` from position `begin` on attend to in the row at `row_begin`."""
    end = add(P, begin, length)
    count = end if settings.window is None else _minimum(P, end, capacity)
    first, stop = (0, count) if row_begin is None else (row_begin, add(P, row_begin, count))
    is_causal = settings.is_fused and settings.window is None and settings.slopes is None
    mask = None if is_causal else _attention_mask(P, begin, end, count, capacity, settings, dtype)
    return HeldKeys(first, stop, count, mask)


def _attention(P: Lowering, query, cache, keys: HeldKeys, settings: ScoreSettings):
    """Return the attention of the queries of a row, `query` [1, H, S, D]."""
    if settings.is_fused:
        return cache.attend(P, query, keys.first, keys.stop, settings.scale, keys.mask)
    k, v = cache.read(P, query, keys.first, keys.stop)
    return _composed_attention(P, query, k, v, cache, keys.count, keys.mask, settings)


def mask_fields(mask) -> dict[str, Any]:
    """Return the fields of an attention node for `mask`, or for a causal mask if it is None."""
    return {"causal": True} if mask is None else {"mask": mask}


def _attention_mask(P: Lowering, begin, end, num_held, capacity, settings: ScoreSettings, dtype):
    """Return the attention mask of the queries.

    Without slopes, the mask is bool [S, num_held]: whether a query attends to an index of the row. With slopes, it has
    the numbers to add to the scores, [H, S, num_held]. The queries have the positions [begin, end). The mask covers the
    first `num_held` indices of the row. With a window, the row is a ring buffer of `capacity` positions.
    """

    def compare(op, a, b):
        return P.emit(op, a=a, b=b)

    def number(value):
        return P.scalar(value, torch.int32)

    window = settings.window
    query_at = P.emit(ir.ExpandDimsNode, x=_range(P, begin, end), axis=1)
    index = _range(P, 0, num_held)
    if window is None:
        key_at = index
    else:
        # Index i of a ring buffer holds the largest position p <= last with p % capacity == i.
        last = number(subtract(P, end, 1))
        distance = P.emit(ir.SubtractNode, a=last, b=index)
        age = P.emit(ir.RemainderNode, a=distance, b=number(capacity))
        key_at = P.emit(ir.SubtractNode, a=last, b=age)
    mask = compare(ir.LessEqualNode, key_at, query_at)
    if window is not None:
        before = P.emit(ir.SubtractNode, a=query_at, b=number(window))
        if settings.blocks:
            in_block = P.emit(ir.RemainderNode, a=query_at, b=number(window))
            before = P.emit(ir.SubtractNode, a=query_at, b=P.emit(ir.AddNode, a=in_block, b=number(1)))
        mask = compare(ir.LogicalAndNode, mask, compare(ir.GreaterNode, key_at, before))
    if settings.slopes is None:
        return mask
    distance = P.cast(P.emit(ir.SubtractNode, a=key_at, b=query_at), torch.float32)
    slopes = P.emit(ir.ReshapeNode, x=P.cast(settings.slopes, torch.float32), shape=[-1, 1, 1])
    bias = P.cast(P.emit(ir.MultiplyNode, a=slopes, b=distance), dtype)
    return P.emit(ir.WhereNode, condition=mask, x=bias, y=P.scalar(-torch.inf, dtype))


def _composed_attention(P: Lowering, query, k, v, cache, num_held, mask, settings: ScoreSettings):
    """Return the attention as several instructions, because `SdpaNode` supports neither soft-capped scores nor sinks.

    The query heads that share a key head are stacked in one matrix, so that the keys need not be repeated.
    """
    batch, heads, _, size = query.shape
    length = P.size(query, 2)
    stacked = [batch, cache.heads, P.emit(ir.MultiplyIntNode, a=length, b=heads // cache.heads)]

    def reshape(x, *extents):
        return P.emit(ir.ReshapeNode, x=x, shape=list(extents))

    def number(value, dtype=query.dtype):
        return P.scalar(value, dtype)

    softcap = settings.softcap
    q = reshape(query, *stacked, size)
    transposed = P.emit(ir.TransposeNode, x=k, perm=[0, 1, 3, 2])
    scores = reshape(P.emit(ir.AddmmNode, mat1=q, mat2=transposed), batch, heads, length, num_held)
    scores = P.emit(ir.MultiplyNode, a=scores, b=number(settings.scale / (softcap or 1)))
    if softcap is not None:
        scores = P.emit(ir.MultiplyNode, a=P.emit(ir.TanhNode, x=scores), b=number(softcap))
    if settings.slopes is None:
        scores = P.emit(ir.WhereNode, condition=mask, x=scores, y=number(-torch.inf))
    else:
        scores = P.emit(ir.AddNode, a=scores, b=mask)
    if settings.sinks is not None:
        sinks = reshape(P.cast(settings.sinks, query.dtype), 1, heads, 1, 1)
        sinks = P.emit(ir.BroadcastToNode, x=sinks, shape=[batch, heads, length, 1])
        scores = P.emit(ir.ConcatenateNode, tensors=[scores, sinks], axis=3)
    weights = P.emit(ir.SoftmaxNode, x=scores, axis=-1, precise=True)
    if settings.sinks is not None:
        weights = P.emit(ir.SliceNode, x=weights, axis=3, start=0, stop=num_held)
    out = P.emit(ir.AddmmNode, mat1=reshape(weights, *stacked, num_held), mat2=v)
    return reshape(out, batch, heads, length, cache.value_size)


# -- integers on the host -----------------------------------------------------


def _minimum(P: Lowering, value, bound):
    """Return min(value, bound) for value >= 0 and bound > 0. The IR has no instruction for the minimum of integers."""
    quotient = P.emit(ir.FloorDivideIntNode, a=value, b=bound)
    is_below = P.emit(ir.FloorDivideIntNode, a=1, b=add(P, quotient, 1))  # 1 if value < bound, else 0
    return add(P, bound, P.emit(ir.MultiplyIntNode, a=is_below, b=subtract(P, value, bound)))


def _range(P: Lowering, begin, end):
    return P.emit(ir.ARangeNode, start=begin, stop=end, step=1, scalar_type=dtypes.scalar_type(torch.int32))
