"""Emits attention over the rows of a KV cache. `FloatCache` in `ops/kv_cache.py` says what a cache has to provide.

`P` is the `Lowering`. In shapes, H is the number of query heads, S of queries and D the size of a query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...builder import dtypes
from ...builder.lowering import Lowering
from ...custom_ops.primitives import attention_mask, composed_attention
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
    mask = None
    if not is_causal:
        queries = P.with_extent(_range(P, begin, end), 0, length)
        size = P.as_extent(count), capacity
        (mask,) = P.trace(attention_mask, queries, settings.slopes, *size, settings.window, settings.blocks, dtype)
    return HeldKeys(first, stop, count, mask)


def _attention(P: Lowering, query, cache, keys: HeldKeys, settings: ScoreSettings):
    """Return the attention of the queries of a row, `query` [1, H, S, D]."""
    if settings.is_fused:
        return cache.attend(P, query, keys.first, keys.stop, settings.scale, keys.mask)
    k, v = cache.read(P, query, keys.first, keys.stop, keys.count)
    return P.trace(composed_attention, query, k, v, keys.mask, settings.sinks, settings.scale, settings.softcap)[0]


def mask_fields(mask) -> dict[str, Any]:
    """Return the fields of an attention node for `mask`, or for a causal mask if it is None."""
    return {"causal": True} if mask is None else {"mask": mask}


# -- integers on the host -----------------------------------------------------


def _minimum(P: Lowering, value, bound):
    """Return min(value, bound) for value >= 0 and bound > 0. The IR has no instruction for the minimum of integers."""
    quotient = P.emit(ir.FloorDivideIntNode, a=value, b=bound)
    is_below = P.emit(ir.FloorDivideIntNode, a=1, b=add(P, quotient, 1))  # 1 if value < bound, else 0
    return add(P, bound, P.emit(ir.MultiplyIntNode, a=is_below, b=subtract(P, value, bound)))


def _range(P: Lowering, begin, end):
    return P.emit(ir.ARangeNode, start=begin, stop=end, step=1, scalar_type=dtypes.scalar_type(torch.int32))
