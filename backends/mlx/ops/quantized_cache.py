"""Lowers `mlx::quantize_entries` and `mlx::quantized_attention`: quantized KV caches.

They are lowered to `QuantizeEntriesNode` and `QuantizedSdpaNode`, whose portable forms are arithmetic instructions.
What the nodes do not support is lowered to arithmetic instructions only: soft-capped scores, attention sinks and very
large entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..builder import dtypes
from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY
from ..custom_ops.quantized_cache import EntryFormat, dequantize, quantize, quantize_entries, quantized_attention
from ..serialization import ir
from .lib.cache_write import subtract
from .lib.cached_attention import ScoreSettings, attend_rows, mask_fields

_MAX_GROUPS = 1024  # of an entry, in the nodes


@REGISTRY.lower(quantize_entries)
def lower_quantize_entries(P: Lowering, xs, group_size, bits, rotate, dtype):
    format = EntryFormat(group_size, bits, rotate)
    groups = sum(format.groups(x.shape[-1]) for x in xs)
    if groups > _MAX_GROUPS or not all(x.ndim == 4 and x.dtype.is_floating_point for x in xs):
        return P.trace(quantize, xs, format, dtype)
    outs = [P.fresh(value) for value in P.out]
    fields = format._asdict() | {"scale_type": dtypes.scalar_type(dtype)}
    P.emit(ir.QuantizeEntriesNode, xs=xs, **fields, out=outs[0], out_scales=outs[1])
    return outs


@REGISTRY.form(ir.QuantizeEntriesNode)
def _quantize_entries(P: Lowering, n, env):
    return P.trace(quantize, n.xs, EntryFormat(n.group_size, n.bits, n.rotate), n.out_scales.dtype)


@REGISTRY.lower(quantized_attention)
def lower_quantized_attention(
    P: Lowering,
    query,
    entries,
    scales,
    start,
    value_offset,
    value_size,
    group_size,
    bits,
    rotate,
    row,
    rows,
    **settings,
):
    cache = _QuantizedCache(entries, scales, value_offset, value_size, EntryFormat(group_size, bits, rotate))
    return attend_rows(P, query, cache, start, row, rows, ScoreSettings(**settings))


@dataclass(frozen=True)
class _QuantizedCache:
    """The slots of a quantized cache. Has the properties and methods that `FloatCache` lists."""

    entries: Any
    scales: Any
    value_offset: int
    value_size: int
    format: EntryFormat

    @property
    def length(self):
        return self.entries.shape[2]

    @property
    def heads(self):
        return self.entries.shape[1]

    def read(self, P: Lowering, query, first, stop, count):
        # The first group of a key and its size, then those of a value.
        parts = ((0, query.shape[3]), (self.value_offset // self.format.group_size, self.value_size))
        held = [P.emit(ir.SliceNode, x=x, axis=2, start=first, stop=stop) for x in (self.entries, self.scales)]
        held = [P.with_extent(x, 2, count) for x in held]
        return [P.trace(dequantize, *held, *part, self.format, query.dtype)[0] for part in parts]

    def attend(self, P: Lowering, query, first, stop, scale, mask):
        if self.scales.shape[3] // 2 > _MAX_GROUPS:
            return self.attend_floats(P, query, first, stop, scale, mask)
        return P.emit(
            ir.QuantizedSdpaNode,
            q=query,
            cache=self.entries,
            scales=self.scales,
            start=first,
            stop=stop,
            value_offset=self.value_offset,
            value_size=self.value_size,
            **self.format._asdict(),
            scale=scale,
            **mask_fields(mask),
        )

    def attend_floats(self, P: Lowering, query, first, stop, scale, mask):
        """Do what `attend` does with dequantized keys and values."""
        count = P.as_extent(subtract(P, stop, first))
        k, v = self.read(P, query, first, stop, count)
        return P.emit(ir.SdpaNode, q=query, k=k, v=v, scale=scale, **mask_fields(mask))

    def attend_rows(self, P: Lowering, query, held, scale):
        return None


@REGISTRY.form(ir.QuantizedSdpaNode)
def _quantized_sdpa(P: Lowering, n, env):
    format = EntryFormat(n.group_size, n.bits, n.rotate)
    cache = _QuantizedCache(n.cache, n.scales, n.value_offset, n.value_size, format)
    return cache.attend_floats(P, n.q, n.start, n.stop, n.scale, n.mask)
