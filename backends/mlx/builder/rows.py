"""Rows of a cache, written where they stand."""

from __future__ import annotations

from ..serialization import ir


def write_rows(P, cache, update, begin, capacity=None):
    """`cache` [B, H, C, D] with `update` [B, H, S, D] in the rows from `begin` on, which are taken
    modulo `capacity` where it is given; in place where that may be."""
    length = P.size(update, 2)
    update = P.cast(update, cache.dtype)
    if capacity is None:
        return _write(P, cache, P.in_place(cache), update, begin, add(P, begin, length))
    row = P.emit(ir.ModIntNode, a=begin, b=capacity)
    end = add(P, row, length)
    # The rows that go round: end - capacity of them, or none.
    round_ = P.emit(ir.MultiplyIntNode, a=P.emit(ir.FloorDivideIntNode, a=end, b=capacity),
                    b=subtract(P, end, capacity))
    stay = subtract(P, length, round_)
    head = P.emit(ir.SliceNode, x=update, axis=2, start=0, stop=stay)
    tail = P.emit(ir.SliceNode, x=update, axis=2, start=stay, stop=length)
    target = P.in_place(cache)
    written = _write(P, cache, target, head, row, add(P, row, stay))
    return _write(P, written, target, tail, 0, round_)


def _write(P, cache, target, update, start, stop):
    out = {} if target is None else {"out": target}
    return P.emit(ir.SliceUpdateNode, dst=cache, update=update, axis=2, start=start, stop=stop, **out)


def add(P, a, b):
    return P.emit(ir.AddIntNode, a=a, b=b)


def subtract(P, a, b):
    return P.emit(ir.SubtractIntNode, a=a, b=b)
