"""Finds the FX node that each instruction of an MLX program computes.

An MLX program does not name the FX nodes that it was compiled from. `trace_origins` compiles the same graph again,
records which instructions lower each FX node, and checks that the result has the instructions of the MLX program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from ..builder.emitter import Emitted
from ..builder.liveness import arrange, results
from ..builder.matcher import Match
from ..builder.program import ProgramBuilder
from ..builder.slots import Slot, TensorSlot
from ..serialization import ir
from ..serialization.listing import unwrap_operand


class ProgramMismatch(Exception):
    """The graph does not compile to the instructions of the MLX program. The message names the first difference."""


@dataclass(frozen=True)
class Origin:
    """Where the value of FX node `node` is: instruction `index` of the main chain writes it to tensor slot `tid`.

    If the node returns a list of tensors, `part` is the index of this tensor in the list; otherwise it is None.
    `first_index` is the index of the first instruction that lowers the node.
    """

    index: int
    first_index: int
    tid: int
    node: Node
    part: int | None


def trace_origins(program: ExportedProgram, graph: ir.MLXGraph) -> list[Origin]:
    """Return the origins of the tensors that the main chain of `graph` computes, in the order of the instructions.

    `program` is the delegated graph. Raises ProgramMismatch if it does not compile to `graph`.
    """
    builder = _Recorder(program, allow_extensions=has_extensions(graph))
    builder.build()
    arrange(builder)
    ids = _match(builder, graph)
    kept = {id(emitted): index for index, emitted in enumerate(builder.chains[0])}
    origins = []
    for node, part, slot, emitted, lowered in builder.records:
        indices = [kept[id(e)] for e in lowered if id(e) in kept]
        if id(emitted) in kept:
            index = kept[id(emitted)]
            origins.append(Origin(index, min(indices, default=index), ids[slot], node, part))
    return sorted(origins, key=lambda origin: origin.index)


def has_extensions(graph: ir.MLXGraph) -> bool:
    """Whether an MLX program contains an instruction that ExecuTorch's own MLX delegate lacks."""
    chains = graph.instruction_chains
    return any(i.op.OP_TYPE >= ir.FIRST_EXTENSION for chain in chains for i in chain.instructions)


class _Recorder(ProgramBuilder):
    """A builder that records, for every FX node, the instruction that computes its value and all that lower the node.

    It records the nodes of the delegated graph, but not those of inner graphs, such as the trace of a composite.
    """

    def __init__(self, program: ExportedProgram, *, allow_extensions: bool):
        super().__init__(program, allow_extensions=allow_extensions)
        self.records: list[tuple[Node, int | None, TensorSlot, Emitted, list[Emitted]]] = []
        self._writers: dict[Slot, Emitted] = {}  # by slot, the last instruction so far that wrote it
        self._seen = 0  # number of instructions that `_writers` covers
        self._start = 0  # number of instructions before the node being lowered

    def _lower_node(self, node: Node, match: Match) -> None:
        if not self._lowering:
            self._start = len(self.chains[0])
        super()._lower_node(node, match)

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
    """Return the number that each slot of `builder` has in `graph`.

    Raises ProgramMismatch if the instructions differ in more than the numbers of their slots.
    """
    numbers: dict[Slot, int] = {}
    chains = [
        [i.op for i in chain.instructions]
        for c, chain in enumerate(graph.instruction_chains)
        if c != graph.init_chain_idx
    ]
    if len(chains) != len(builder.chains):
        raise ProgramMismatch(
            f"the program has {len(chains)} chains, the graph of the module compiles to {len(builder.chains)}"
        )
    for c, (emitted_chain, ops) in enumerate(zip(builder.chains, chains)):
        for index, (emitted, op) in enumerate(zip(emitted_chain, ops)):
            if emitted.op is not type(op) or not _same_fields(emitted, op, numbers):
                fields = " with other fields" if emitted.op is type(op) else ""
                raise ProgramMismatch(
                    f"instruction {index} of chain {c} is {op.NAME}, the graph of the module compiles to "
                    f"{emitted.op.NAME}{fields}"
                )
        if len(emitted_chain) != len(ops):
            raise ProgramMismatch(
                f"chain {c} has {len(ops)} instructions, the graph of the module compiles to {len(emitted_chain)}"
            )
    return numbers


def _same_fields(emitted: Emitted, op: ir.Op, numbers: dict[Slot, int]) -> bool:
    """Whether every field that `emitted` sets has the same value in `op`."""
    return all(
        emitted.fields.get(f.name) is None or _same(emitted.fields[f.name], getattr(op, f.name), numbers)
        for f in op.FIELDS
    )


def _same(value: Any, stored: Any, numbers: dict[Slot, int]) -> bool:
    """Whether the field `stored` of an MLX program equals `value`.

    `numbers` has the numbers of the slots. A slot that is not in it yet gets the number in `stored`.
    """
    if isinstance(value, (list, tuple)):
        return (
            isinstance(stored, list)
            and len(value) == len(stored)
            and all(_same(v, s, numbers) for v, s in zip(value, stored))
        )
    stored = unwrap_operand(stored)
    if isinstance(value, Slot):
        kind = ir.Tid if isinstance(value, TensorSlot) else ir.Vid
        return type(stored) is kind and numbers.setdefault(value, stored.idx) == stored.idx
    if isinstance(value, float) or isinstance(stored, float):  # stored with 32 bits
        same_nan = math.isnan(value) and math.isnan(stored)
        return same_nan or value == stored or math.isclose(value, stored, rel_tol=1e-6)
    return value == stored
