"""Lowers the operators on mutable buffers: `mlx::cache_update`, `mlx::cached_attention` and `mlx::read_state`.

An update of a row of a KV cache is one `SliceUpdateNode`, or two if the positions may wrap around a ring buffer. It is
done in place where possible. Attention over a row is an `SdpaNode` over the positions that the row holds. If the scores
are soft-capped, or there are attention sinks, the attention is computed with matrix products and a softmax instead. If
the operands belong to several rows, `RowUpdateNode` and `RowSdpaNode` process all rows. In their portable forms, each
row has instructions of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY
from ..serialization import ir
from .lib.cache_write import part_of_row, write_cache, write_rows
from .lib.cached_attention import ScoreSettings, attend_rows, mask_fields, places_of_rows


@REGISTRY.lower(torch.ops.mlx.cache_update.default)
def cache_update(P: Lowering, cache, update, start, ring=False, row=None, rows=1):
    capacity = cache.shape[2] // rows
    places = places_of_rows(P, update, start, row, rows, capacity, ring)
    ring_length = capacity if ring else None
    if len(places) > 1:
        return write_rows(P, cache, update, places, ring_length)
    ((position, row_begin),) = places
    return write_cache(P, cache, update, position, ring_length, row_begin)


@dataclass(frozen=True)
class FloatCache:
    """The slots of the keys [1, G, rows * L, D] and of the values [1, G, rows * L, E] of a KV cache.

    G is the number of key heads, L the number of positions of a row, D the size of a key, and E that of a value.

    `attend_rows` takes any cache with these properties and methods:

    - `length`: the size of axis 2, rows * L. It counts the positions of all rows.
    - `heads`: G.
    - `value_size`: E.
    - `read`: returns the keys and values at the indices [first, stop) of axis 2, which are `count` positions.
    - `attend`: returns the attention of `query` over these keys and values, without soft cap and sinks.
    - `attend_rows`: returns the attention of several rows, with a query and `HeldKeys` for each. None if no node
      computes it.
    """

    keys: Any
    values: Any

    @property
    def length(self):
        return self.keys.shape[2]

    @property
    def heads(self):
        return self.keys.shape[1]

    @property
    def value_size(self):
        return self.values.shape[3]

    def read(self, P: Lowering, query, first, stop, count):
        return [P.cast(P.with_extent(x, 2, count), query.dtype) for x in self._slices(P, first, stop)]

    def attend(self, P: Lowering, query, first, stop, scale, mask):
        # For float32 queries, the node reads keys and values of half precision as they are.
        k, v = self._slices(P, first, stop)
        if query.dtype != torch.float32:
            k, v = P.cast(k, query.dtype), P.cast(v, query.dtype)
        return P.emit(ir.SdpaNode, q=query, k=k, v=v, scale=scale, **mask_fields(mask))

    def _slices(self, P: Lowering, first, stop):
        return [P.emit(ir.SliceNode, x=c, axis=2, start=first, stop=stop) for c in (self.keys, self.values)]

    def attend_rows(self, P: Lowering, query, held, scale):
        # The node reads keys as they are. They must not have more precision than the casts of `read` leave.
        if query.dtype not in (torch.float32, self.keys.dtype) or self.keys.dtype != self.values.dtype:
            return None
        return P.emit(
            ir.RowSdpaNode,
            q=query,
            k=self.keys,
            v=self.values,
            scale=scale,
            starts=[keys.first for keys in held],
            stops=[keys.stop for keys in held],
            masks=[keys.mask for keys in held if keys.mask is not None],
        )


@REGISTRY.form(ir.RowSdpaNode, always=True)
def _row_sdpa(P: Lowering, n, env):
    cache, masks = FloatCache(n.k, n.v), n.masks or [None] * len(n.starts)
    out = [
        cache.attend(P, part_of_row(P, n.q, i), start, stop, n.scale, mask)
        for i, (start, stop, mask) in enumerate(zip(n.starts, n.stops, masks, strict=True))
    ]
    return P.emit(ir.ConcatenateNode, tensors=out, axis=2)


@REGISTRY.lower(torch.ops.mlx.cached_attention.default)
def cached_attention(P: Lowering, query, keys, values, start, row, rows, **settings):
    return attend_rows(P, query, FloatCache(keys, values), start, row, rows, ScoreSettings(**settings))


@REGISTRY.lower(torch.ops.mlx.read_state.default)
def read_state(P: Lowering, buffer):
    return buffer
