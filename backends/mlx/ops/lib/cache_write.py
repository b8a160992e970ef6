"""Emits instructions that write into KV caches, and the host arithmetic on positions for these writes.

`P` is the `Lowering`.
"""

from __future__ import annotations

from ...builder.lowering import Lowering
from ...builder.registry import REGISTRY
from ...serialization import ir


def write_cache(P: Lowering, cache, update, begin, ring=None, row_begin=None):
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


def part_of_row(P: Lowering, x, index):
    """Return x[:, :, index : index + 1], for x with 4 axes."""
    return P.emit(ir.SliceNode, x=x, axis=2, start=index, stop=index + 1)


def write_rows(P: Lowering, cache, update, places, ring=None):
    """Emit a write of one position to each of several rows, and return the slot of the written cache.

    `update` is [B, H, rows, D]. `places` has the position and the `row_begin` of each row: see `write_cache`.
    """
    update = P.cast(update, cache.dtype)
    starts = [
        add(P, row_begin, position if ring is None else P.emit(ir.ModIntNode, a=position, b=ring))
        for position, row_begin in places
    ]
    target = P.in_place_target(cache)
    out = {} if target is None else {"out": target}
    return P.emit(ir.RowUpdateNode, dst=cache, update=update, starts=starts, **out)


@REGISTRY.form(ir.RowUpdateNode, always=True)
def _row_update(P: Lowering, n, env):
    written, target = n.dst, n.out if n.out is n.dst else None
    for index, start in enumerate(n.starts):
        written = _write(P, written, target, part_of_row(P, n.update, index), start, add(P, start, 1))
    return written


def _write(P: Lowering, cache, target, update, start, stop, row_begin=None):
    out = {} if target is None else {"out": target}
    if row_begin is not None:
        start, stop = add(P, row_begin, start), add(P, row_begin, stop)
    return P.emit(ir.SliceUpdateNode, dst=cache, update=update, axis=2, start=start, stop=stop, **out)


def add(P: Lowering, a, b):
    """Emit a + b, for integers on the host: Python numbers or value slots. Returns a value slot."""
    return P.emit(ir.AddIntNode, a=a, b=b)


def subtract(P: Lowering, a, b):
    """Emit a - b, for integers on the host: Python numbers or value slots. Returns a value slot."""
    return P.emit(ir.SubtractIntNode, a=a, b=b)
