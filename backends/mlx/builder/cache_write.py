"""Emits instructions that write into KV caches, and the host arithmetic on positions for these writes."""

from __future__ import annotations

from ..serialization import ir


def write_cache(P, cache, update, begin, capacity=None):
    """Emit a write of `update` [B, H, S, D] into `cache` [B, H, C, D] and return the slot of the written cache.

    The write starts at position `begin`. With `capacity`, the cache is a ring buffer: position `p` is stored at index
    `p % capacity`. The cache is overwritten in place if `P.in_place` permits it.
    """
    length = P.size(update, 2)
    update = P.cast(update, cache.dtype)
    if capacity is None:
        return _write(P, cache, P.in_place(cache), update, begin, add(P, begin, length))
    start = P.emit(ir.ModIntNode, a=begin, b=capacity)
    end = add(P, start, length)
    # The number of positions beyond the end of the ring buffer, which are written at its start. `end // capacity` is 0
    # or 1, so `wrapped` is 0 or `end - capacity`.
    wrapped = P.emit(ir.MultiplyIntNode, a=P.emit(ir.FloorDivideIntNode, a=end, b=capacity),
                     b=subtract(P, end, capacity))
    unwrapped = subtract(P, length, wrapped)
    head = P.emit(ir.SliceNode, x=update, axis=2, start=0, stop=unwrapped)
    tail = P.emit(ir.SliceNode, x=update, axis=2, start=unwrapped, stop=length)
    target = P.in_place(cache)
    written = _write(P, cache, target, head, start, add(P, start, unwrapped))
    return _write(P, written, target, tail, 0, wrapped)


def _write(P, cache, target, update, start, stop):
    out = {} if target is None else {"out": target}
    return P.emit(ir.SliceUpdateNode, dst=cache, update=update, axis=2, start=start, stop=stop, **out)


def add(P, a, b):
    return P.emit(ir.AddIntNode, a=a, b=b)


def subtract(P, a, b):
    return P.emit(ir.SubtractIntNode, a=a, b=b)
