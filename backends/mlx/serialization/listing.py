"""Lists the instructions of an MLX program: the results, operands and attributes of each, by field name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import ir
from .table import CHAIN_FIELDS

SPACES = ("constant", "input", "output", "buffer", "temporary")  # the kinds of tensor slots, in the order of their ids
_OPERAND_TYPES = ("Tid", "Vid", "IntOrVid", "FloatOrVid", "VidOrTid", "IntOrVidOrTid")
_DIGEST = re.compile(r"\.[0-9a-f]{16}$")  # the digest that builder/assemble.py appends to the name of a constant

Slot = ir.Tid | ir.Vid


def tensor_ids(graph: ir.MLXGraph) -> dict[str, range]:
    """Return the ids of the tensor slots of each space, in the order of `SPACES`."""
    ranges, start = {}, 0
    for space, field_name in zip(SPACES, ("constant", "input", "output", "mutable_buffer", "temp")):
        count = getattr(graph, f"num_{field_name}_tensors")
        ranges[space] = range(start, start + count)
        start += count
    return ranges


def space_of(graph: ir.MLXGraph, tid: int) -> str | None:
    """Return the space of the tensor slot `tid`, one of `SPACES`, or None if there is no such slot."""
    return next((space for space, ids in tensor_ids(graph).items() if tid in ids), None)


def without_digest(key: str) -> str:
    """Return the name of a constant or buffer whose key in the named data is `key`."""
    return _DIGEST.sub("", key)


class SlotNames:
    """Gives slots names. Calling an instance with a slot returns the name of the slot.

    The name is the one in the program, without the digest. If several slots have that name, the id is appended: `w%3`.
    A tensor slot without a name is `%3`, and a value slot `$3`. `keys` maps the id of a tensor slot to its full name.
    """

    def __init__(self, graph: ir.MLXGraph):
        self.keys = {s.slot.idx: s.name for s in graph.named_slots or () if s.slot.slot_type == ir.SlotType.TensorSlot}
        short = {tid: without_digest(key) for tid, key in self.keys.items()}
        used = Counter(short.values())
        self._short = {tid: name if used[name] == 1 else f"{name}%{tid}" for tid, name in short.items()}

    def __call__(self, slot: Slot) -> str:
        if isinstance(slot, ir.Vid):
            return f"${slot.idx}"
        return self._short.get(slot.idx, f"%{slot.idx}")


@dataclass
class ListedInstruction:
    """One instruction: the `index`-th of chain `chain`.

    `op` is the name of the IR node without "Node". `operands` has slots, numbers or lists of these, by field name.
    `attributes` has the values of the other fields. `chains` has the indices of the chains that a control instruction
    runs.
    """

    chain: int
    index: int
    op: str
    node: ir.Op
    results: list[Slot] = field(default_factory=list)
    operands: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    chains: list[int] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """The steps of type inference for this instruction: 1 plus the number of slots and numbers in its lists."""
        fields = [self.results, *self.operands.values(), *self.attributes.values()]
        return 1 + sum(len(value) for value in fields if isinstance(value, list))

    def slots_read(self) -> Iterator[Slot]:
        for value in self.operands.values():
            for v in value if isinstance(value, list) else [value]:
                if isinstance(v, Slot):
                    yield v


def list_instructions(graph: ir.MLXGraph) -> list[list[ListedInstruction]]:
    """Return the instructions of each chain."""
    return [
        [_list_instruction(instruction.op, c, i) for i, instruction in enumerate(chain.instructions)]
        for c, chain in enumerate(graph.instruction_chains)
    ]


def list_replacements(graph: ir.MLXGraph) -> list[tuple[ListedInstruction, int]]:
    """Return the instruction of each replacement, with the chain and index of the first instruction that it replaces,
    and the number of instructions that it replaces.
    """
    return [(_list_instruction(r.instruction.op, r.chain, r.first), r.count) for r in graph.replacements or ()]


def _list_instruction(node: ir.Op, chain: int, index: int) -> ListedInstruction:
    instruction = ListedInstruction(chain, index, node.NAME.removesuffix("Node"), node)
    for f in node.FIELDS:
        value = getattr(node, f.name)
        if value is None:
            continue
        if f.name in CHAIN_FIELDS:
            instruction.chains.append(value)
        elif f.output and not f.inout:
            instruction.results += value if isinstance(value, list) else [value]
        elif f.type.strip("[]") in _OPERAND_TYPES:
            is_list = isinstance(value, list)
            instruction.operands[f.name] = [unwrap_operand(v) for v in value] if is_list else unwrap_operand(value)
        else:
            instruction.attributes[f.name] = value
    return instruction


def unwrap_operand(value: Any) -> Slot | int | float:
    """Return the slot or number in an `IntOrVid`, `FloatOrVid`, `VidOrTid` or `IntOrVidOrTid`.

    Returns any other value unchanged.
    """
    if isinstance(value, (ir.IntOrVid, ir.FloatOrVid)):
        return value.vid if value.is_vid else value.literal
    if isinstance(value, ir.VidOrTid):
        return value.vid if value.is_vid else value.tid
    if isinstance(value, ir.IntOrVidOrTid):
        return (value.literal, value.vid, value.tid)[value.kind]
    return value
