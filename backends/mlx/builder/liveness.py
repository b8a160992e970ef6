"""Which instructions somebody reads, and which temporaries live when."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

from ..serialization import ir
from .program import Emitted, ProgramBuilder
from .slots import Slot, Space, TensorSlot

_RESULTS = ("out", "outs")
_LOOPS = (ir.ScanNode, ir.WhileNode)
_CONTROL = (ir.IfNode, *_LOOPS)
_CHAINS = ("then_chain_idx", "else_chain_idx", "cond_chain_idx", "body_chain_idx")


def drop_dead(builder: ProgramBuilder) -> None:
    """Remove the instructions whose results are temporaries that nothing reads."""
    wanted: set[Slot] = set(builder.interface.outputs)
    sizes = None
    # What a dead instruction read may die with it.
    while sizes != (sizes := [len(chain) for chain in builder.chains]):
        read = {s for chain in builder.chains for e in chain for s in operands(e)}
        for chain in builder.chains:
            chain[:] = [e for e in chain if not _is_dead(e, read | wanted)]


def operands(emitted: Emitted) -> Iterator[Slot]:
    """The slots an instruction reads."""
    for name, value in emitted.fields.items():
        if name not in _RESULTS:
            yield from slots_in(value)


def slots_in(value: Any) -> Iterator[Slot]:
    for v in value if isinstance(value, list) else [value]:
        if isinstance(v, Slot):
            yield v


def _is_dead(emitted: Emitted, needed: set[Slot]) -> bool:
    if issubclass(emitted.op, _CONTROL):
        return False
    results = [s for name in _RESULTS for s in slots_in(emitted.fields.get(name))]
    return bool(results) and all(
        s not in needed and not (isinstance(s, TensorSlot) and s.space != Space.TEMP)
        for s in results
    )


def lifetimes(builder: ProgramBuilder) -> dict[TensorSlot, tuple[int, int]]:
    """Temporary → the first and the last moment that touches it.

    Moments count instructions as if the chains of an if stood one after the other before it: what
    runs is a part of that line, in its order. A loop goes back: what it or its body touches is in
    use from its begin to its end.
    """
    lives: dict[TensorSlot, tuple[int, int]] = {}
    now = 0

    def visit(chain: list[Emitted]) -> set[TensorSlot]:
        nonlocal now
        touched = set()
        for emitted in chain:
            begin, inner = now, set()
            for name in _CHAINS:
                if name in emitted.fields:
                    inner |= visit(builder.chains[emitted.fields[name]])
            own = {s for value in emitted.fields.values() for s in slots_in(value) if _is_temporary(s)}
            again = issubclass(emitted.op, _LOOPS)
            for slot in own | inner if again else own:
                first, last = lives.get(slot, (now, now))
                lives[slot] = min(first, begin if again else now), max(last, now)
            touched |= own | inner
            now += 1
        return touched

    visit(builder.chains[0])
    return lives


def _is_temporary(slot: Slot) -> bool:
    return isinstance(slot, TensorSlot) and slot.space == Space.TEMP


def recycle(lives: dict[TensorSlot, tuple[int, int]]) -> dict[TensorSlot, int]:
    """Temporary → its number, which temporaries that do not live at the same time share.

    A result never gets the number of an operand of the same instruction: ops write their results
    one by one while they read, and an update whose `out` is its `dst` is one in place.
    """
    numbers: dict[TensorSlot, int] = {}
    free: list[int] = []
    live: list[tuple[int, int]] = []  # (last, number)
    for slot, (first, last) in sorted(lives.items(), key=lambda item: item[1][0]):
        while live and live[0][0] < first:
            heapq.heappush(free, heapq.heappop(live)[1])
        numbers[slot] = heapq.heappop(free) if free else len(live)
        heapq.heappush(live, (last, numbers[slot]))
    return numbers
