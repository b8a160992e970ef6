"""Which instructions somebody reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..serialization import ir
from .program import Emitted, ProgramBuilder
from .slots import Slot, Space, TensorSlot

_RESULTS = ("out", "outs")
_CONTROL = (ir.IfNode, ir.ScanNode)


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
