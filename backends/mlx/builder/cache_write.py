"""Emits instructions that write into KV caches, and the host arithmetic on positions for these writes.

`P` is the `ProgramBuilder`.
"""

from __future__ import annotations

from ..serialization import ir


def write_cache(P, cache, update, begin, ring=None, row_begin=None):
    """Emit a write of `update` [B, H, S, D] into `cache` [B, H, C, D] and return the slot of the written cache.

    - `begin`: the position of the first element of `update`.
    - `ring`: the number of positions if a row of the cache is a ring buffer, else None.
    - `row_begin`: the index on axis 2 at which the row begins, by default 0.

    Position `p` is stored at index `row_begin + p`, or in a ring buffer at `row_begin + p % ring`. The cache is
    overwritten in place if `P.in_place_target` permits it.
    """
    length = P.size(update, 2)
    update = P.cast(update, cache.dtype)
    target = P.in_place_target(cache)
    if ring is None:
        return _write(P, cache, target, update, begin, add(P, begin, length), row_begin)
    start = P.emit(ir.ModIntNode, a=begin, b=ring)
    end = add(P, start, length)
    if length == 1:
        return _write(P, cache, target, update, start, end, row_begin)
    # The number of positions beyond the end of the ring buffer, which are written at its start. `end // ring` is 0 or
    # 1, so `wrapped` is 0 or `end - ring`.
    wrapped = P.emit(ir.MultiplyIntNode, a=P.emit(ir.FloorDivideIntNode, a=end, b=ring), b=subtract(P, end, ring))
    unwrapped = subtract(P, length, wrapped)
    head = P.emit(ir.SliceNode, x=update, axis=2, start=0, stop=unwrapped)
    tail = P.emit(ir.SliceNode, x=update, axis=2, start=unwrapped, stop=length)
    written = _write(P, cache, target, head, start, add(P, start, unwrapped), row_begin)
    return _write(P, written, target, tail, 0, wrapped, row_begin)


def _write(P, cache, target, update, start, stop, row_begin):
    out = {} if target is None else {"out": target}
    if row_begin is not None:
        start, stop = add(P, row_begin, start), add(P, row_begin, stop)
    return P.emit(ir.SliceUpdateNode, dst=cache, update=update, axis=2, start=start, stop=stop, **out)


def add(P, a, b):
    return P.emit(ir.AddIntNode, a=a, b=b)


def subtract(P, a, b):
    return P.emit(ir.SubtractIntNode, a=a, b=b)
