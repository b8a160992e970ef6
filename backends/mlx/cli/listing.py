"""A program as plain rows: instructions with what they read, write and are told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..serialization import ir

SPACES = ("constant", "input", "output", "buffer", "temporary")
# Fields that an instruction writes. A scan also writes its slices, before each step.
RESULTS = ("out", "outs", "outputs", "sliced")
_CHAINS = ("then_chain_idx", "else_chain_idx", "cond_chain_idx", "body_chain_idx")
_DIGEST = re.compile(r"\.[0-9a-f]{16}$")  # builder/assemble.py puts it behind a constant's name

Slot = ir.Tid | ir.Vid


def spaces(graph: ir.MLXGraph) -> list[range]:
    """The ids of each space of `SPACES`."""
    ranges, start = [], 0
    for space in ("constant", "input", "output", "mutable_buffer", "temp"):
        count = getattr(graph, f"num_{space}_tensors")
        ranges.append(range(start, start + count))
        start += count
    return ranges


def space_of(graph: ir.MLXGraph, tid: int) -> str | None:
    return next((name for name, ids in zip(SPACES, spaces(graph)) if tid in ids), None)


class Names:
    """What to call a slot: by its name if that is its alone, else by its number."""

    def __init__(self, graph: ir.MLXGraph):
        self.keys = {s.slot.idx: s.name for s in graph.named_slots or () if s.slot.slot_type == ir.SlotType.TensorSlot}
        short = {tid: _DIGEST.sub("", key) for tid, key in self.keys.items()}
        taken = list(short.values())
        self._short = {tid: name if taken.count(name) == 1 else f"{name}%{tid}" for tid, name in short.items()}

    def __call__(self, slot: Slot) -> str:
        if isinstance(slot, ir.Vid):
            return f"${slot.idx}"
        return self._short.get(slot.idx, f"%{slot.idx}")


@dataclass
class Row:
    """One instruction. Operands are slots, numbers, or lists of them, by field name."""

    chain: int
    index: int
    op: str
    node: ir.Op
    results: list[Slot] = field(default_factory=list)
    operands: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    chains: list[int] = field(default_factory=list)

    def reads(self) -> Iterator[Slot]:
        for value in self.operands.values():
            for v in value if isinstance(value, list) else [value]:
                if isinstance(v, Slot):
                    yield v


def rows(graph: ir.MLXGraph) -> list[list[Row]]:
    """The rows of every chain."""
    return [
        [row(instruction.op, c, i) for i, instruction in enumerate(chain.instructions)]
        for c, chain in enumerate(graph.instruction_chains)
    ]


def row(node: ir.Op, chain: int = 0, index: int = 0) -> Row:
    result = Row(chain, index, node.NAME.removesuffix("Node"), node)
    for f in node.FIELDS:
        value = getattr(node, f.name)
        if value is None:
            continue
        if f.name in _CHAINS:
            result.chains.append(value)
        elif f.name in RESULTS:
            result.results += value if isinstance(value, list) else [value]
        elif _is_operand(f.type):
            result.operands[f.name] = [operand(v) for v in value] if isinstance(value, list) else operand(value)
        else:
            result.attributes[f.name] = value
    return result


def _is_operand(type_: str) -> bool:
    return type_.strip("[]") in ("Tid", "Vid", "IntOrVid", "FloatOrVid", "VidOrTid", "IntOrVidOrTid")


def operand(value: Any) -> Slot | int | float:
    """The slot or the number that an "or" stands for."""
    if isinstance(value, (ir.IntOrVid, ir.FloatOrVid)):
        return value.vid if value.is_vid else value.literal
    if isinstance(value, ir.VidOrTid):
        return value.vid if value.is_vid else value.tid
    if isinstance(value, ir.IntOrVidOrTid):
        return (value.literal, value.vid, value.tid)[value.kind]
    return value
