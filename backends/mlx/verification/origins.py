"""Which FX node each instruction of a payload computes.

A payload does not name the FX nodes that it was compiled from. `trace_origins` compiles the same graph again, keeps
that map, and proves that the result has the instructions of the payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from ..builder.emitter import Emitted
from ..builder.liveness import drop_dead, results
from ..builder.program import ProgramBuilder
from ..builder.slots import Slot, TensorSlot
from ..inspect.listing import unwrap_operand
from ..serialization import ir


class NotTheSame(Exception):
    """The graph compiles to other instructions than those of the payload. The message names the first difference."""


@dataclass(frozen=True)
class Origin:
    """Instruction `index` of the main chain computes FX node `node`, or the tensor `part` of its list of results.

    `tid` is the tensor slot. `first_index` is the first of the instructions that lower the node.
    """

    index: int
    first_index: int
    tid: int
    node: Node
    part: int | None


def trace_origins(program: ExportedProgram, graph: ir.MLXGraph) -> list[Origin]:
    """The origins of the tensors that the main chain of `graph` computes, in the order of the instructions.

    `program` is the delegated graph. Raises NotTheSame if it does not compile to `graph`.
    """
    builder = _Recorder(program, allow_extensions=_has_extensions(graph))
    builder.build()
    drop_dead(builder)
    ids = _match(builder, graph)
    kept = {id(emitted): index for index, emitted in enumerate(builder.chains[0])}
    origins = []
    for node, part, slot, emitted, lowered in builder.records:
        indices = [kept[id(e)] for e in lowered if id(e) in kept]
        if id(emitted) in kept:
            index = kept[id(emitted)]
            origins.append(Origin(index, min(indices, default=index), ids[slot], node, part))
    return sorted(origins, key=lambda origin: origin.index)


def _has_extensions(graph: ir.MLXGraph) -> bool:
    chains = graph.instruction_chains
    return any(i.op.OP_TYPE >= ir.FIRST_EXTENSION for chain in chains for i in chain.instructions)


class _Recorder(ProgramBuilder):
    """Records, for every FX node of the graph itself, the instruction that computes it and those that lower it."""

    def __init__(self, program: ExportedProgram, *, allow_extensions: bool):
        super().__init__(program, allow_extensions=allow_extensions)
        self.records: list[tuple[Node, int | None, TensorSlot, Emitted, list[Emitted]]] = []
        self._writers: dict[Slot, Emitted] = {}  # by slot, the last instruction so far that wrote it
        self._seen = 0  # number of instructions in `_writers`
        self._start = 0  # number of instructions before the node being lowered

    def _lower_node(self, node: Node, handler: Callable, covered: Sequence[Node]) -> None:
        if not self._lowering:
            self._start = len(self.chains[0])
        super()._lower_node(node, handler, covered)

    def set_value(self, node: Node, value: Any) -> None:
        super().set_value(node, value)
        if len(self._lowering) != 1 or self._lowering[0] is not node:
            return  # an input, or a node of an inner graph
        chain = self.chains[0]
        for emitted in chain[self._seen :]:
            self._writers |= dict.fromkeys(results(emitted), emitted)
        self._seen = len(chain)
        values = value if isinstance(value, (list, tuple)) else [value]
        for part, slot in enumerate(values):
            if isinstance(slot, TensorSlot) and slot in self._writers:
                where = part if values is value else None
                self.records.append((node, where, slot, self._writers[slot], chain[self._start :]))


def _match(builder: ProgramBuilder, graph: ir.MLXGraph) -> dict[Slot, int]:
    """The number of each slot. Raises NotTheSame if the instructions differ by more than the numbers of slots."""
    numbers: dict[Slot, int] = {}
    chains = [[i.op for i in chain.instructions] for chain in graph.instruction_chains]
    if len(chains) != len(builder.chains):
        raise NotTheSame(
            f"the program has {len(chains)} chains, the graph of the module compiles to {len(builder.chains)}"
        )
    for c, (emitted_chain, ops) in enumerate(zip(builder.chains, chains)):
        for index, (emitted, op) in enumerate(zip(emitted_chain, ops)):
            if emitted.op is not type(op) or not _same_fields(emitted, op, numbers):
                raise NotTheSame(
                    f"instruction {index} of chain {c} is {op.NAME}, the graph of the module compiles to another "
                    f"{emitted.op.NAME} there"
                )
        if len(emitted_chain) != len(ops):
            raise NotTheSame(
                f"chain {c} has {len(ops)} instructions, the graph of the module compiles to {len(emitted_chain)}"
            )
    return numbers


def _same_fields(emitted: Emitted, op: ir.Op, numbers: dict[Slot, int]) -> bool:
    return all(
        emitted.fields.get(f.name) is None or _same(emitted.fields[f.name], getattr(op, f.name), numbers)
        for f in op.FIELDS
    )


def _same(value: Any, stored: Any, numbers: dict[Slot, int]) -> bool:
    """Whether `stored` is `value`. A slot has one number throughout."""
    if isinstance(value, (list, tuple)):
        return isinstance(stored, list) and len(value) == len(stored) and all(
            _same(v, s, numbers) for v, s in zip(value, stored)
        )
    stored = unwrap_operand(stored)
    if isinstance(value, Slot):
        kind = ir.Tid if isinstance(value, TensorSlot) else ir.Vid
        return type(stored) is kind and numbers.setdefault(value, stored.idx) == stored.idx
    if isinstance(value, float) or isinstance(stored, float):  # stored with 32 bits
        same_nan = math.isnan(value) and math.isnan(stored)
        return same_nan or value == stored or math.isclose(value, stored, rel_tol=1e-6)
    return value == stored
