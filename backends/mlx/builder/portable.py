"""Lowers instructions that ExecuTorch's own MLX delegate lacks, or takes in another sense than this runtime, once more.

Handlers emit the node of this runtime. After the walk over the graph, `make_portable` puts portable instructions in the
place of each such node, and records the node as their replacement: this runtime runs the node, as if it were in the
chain. `serialization/portability.py` says which instructions are not portable. The forms of the registry lower them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..extents import is_empty, is_same_shape, may_be_empty
from ..serialization import ir
from ..serialization.portability import CHECKS, DTYPES, STRIDED_VIEWS, Problem, problem_of
from ..serialization.types import Shape
from .emitter import Emitted, Replacement
from .lowering import Lowering
from .registry import Unsupported
from .slots import SlotTypes, Space, TensorSlot, ValueSlot, fields_of


def make_portable(builder: Lowering) -> Portability:
    """Replace the instructions of `builder` that are not portable, in place, and return what was not possible.

    A program that may use extensions, and does, keeps its instructions, except those that are always lowered.
    """
    return _Pass(builder).run()


class Portability:
    """What is not portable in a program, by the FX node of the delegated graph that was lowered to the instruction.

    - `differences`: instructions that mean something else on ExecuTorch's own MLX delegate.
    - `unsupported`: extensions that are not permitted and have no portable form, with the reason.
    """

    def __init__(self) -> None:
        self.differences: list[tuple[Node | None, Problem]] = []
        self.unsupported: list[tuple[Node | None, str]] = []


def has_extensions(chains: list[list[Emitted]]) -> bool:
    """Whether an instruction is an extension, so that ExecuTorch's own MLX delegate refuses the whole program."""
    return any(_is_extension(e.op) for chain in chains for e in chain)


def _is_extension(op: type[ir.Op]) -> bool:
    return op.OP_TYPE >= ir.FIRST_EXTENSION


class _Env(SlotTypes):
    """The types of the slots of a builder, and what the checks of portability ask about them."""

    def __init__(self, types: SlotTypes):
        super().__init__()
        self.types = types.types
        self.producers: dict[Any, type[ir.Op]] = {}

    def shape(self, slot: TensorSlot) -> Shape:
        """Return the shape of a tensor slot; its dynamic extents are None. Raises Unknown if the rank is unknown."""
        return tuple(e if isinstance(e, int) else None for e in super().shape(slot))

    def value(self, x: Any) -> int | None:
        return x if isinstance(x, int) else None

    def is_constant(self, slot: TensorSlot) -> bool:
        return slot.space == Space.CONSTANT

    def known_value(self, slot: TensorSlot) -> int | None:
        return slot.constant_value if isinstance(slot.constant_value, int) else None

    def is_guarded(self, slot: TensorSlot) -> bool:
        return self.is_constant(slot) or self.producers.get(slot) is ir.WhereNode

    def is_contiguous(self, slot: TensorSlot) -> bool:
        return self.producers.get(slot) not in STRIDED_VIEWS

    def may_be_empty(self, extent: Any) -> bool:
        if isinstance(extent, ValueSlot):
            return isinstance(extent.symbol, torch.SymInt) and may_be_empty(extent.symbol)
        return extent == 0

    def same_extents(self, a: TensorSlot, b: TensorSlot, except_axis: int | None = None) -> bool:
        if a.shape is None or b.shape is None:
            return super().same_extents(a, b, except_axis)
        rest_a, rest_b = ([e for i, e in enumerate(s.shape) if i != except_axis] for s in (a, b))
        return is_same_shape(rest_a, rest_b)

    def record(self, emitted: Emitted) -> None:
        """Remember the node that computes the results of an instruction."""
        self.producers |= dict.fromkeys(written_by(emitted), emitted.op)


class _Pass:
    def __init__(self, builder: Lowering):
        self.builder, self.forms = builder, builder.registry.forms
        self.env = _Env(builder.types)
        self.left = Portability()
        used = {e.op for chain in builder.chains for e in chain if _is_extension(e.op)}
        self.is_extended = builder.allow_extensions and any(not self._is_always_lowered(op) for op in used)

    def run(self) -> Portability:
        chains = self.builder.chains
        for chain in chains:  # forms append further chains
            self._visit(chain)
        return self.left

    def _visit(self, chain: list[Emitted]) -> None:
        results: dict[tuple, Any] = {}  # of the instructions so far, for those that forms emit
        producers: dict[Any, Emitted] = {}
        lowered = []
        for emitted in chain:
            new = self._lower(emitted, results, producers)
            if new[0] is not emitted:
                self._substitute(chain, emitted, new)
            elif emitted.expression is not None:
                results[emitted.expression] = emitted.fields["out"]
                producers[emitted.fields["out"]] = emitted
            lowered += new
        chain[:] = lowered

    def _is_always_lowered(self, op: type[ir.Op]) -> bool:
        return op in self.forms and self.forms[op].always

    def _lower(self, emitted: Emitted, results: dict, producers: dict) -> list[Emitted]:
        """Return the portable instructions for an instruction: itself if it is portable, or cannot be lowered."""
        op, problem = emitted.op, None
        if not self.is_extended:
            problem = self._problem_of(emitted)
            if not _is_extension(op) and (of_operand := _operand_problem(emitted)) is not None:
                self.left.differences.append((emitted.origin, of_operand))
        if problem is None and self._is_always_lowered(op):
            problem = Problem("extension", op.NAME)
        if problem is not None:
            try:
                return self._apply_form(emitted, results, producers)
            except Unsupported as unsupported:
                if _is_extension(op) and not self.builder.allow_extensions:
                    self.left.unsupported.append((emitted.origin, unsupported.reason))
                else:
                    self.left.differences.append((emitted.origin, problem))
        self.env.record(emitted)
        return [emitted]

    def _problem_of(self, emitted: Emitted) -> Problem | None:
        if emitted.op not in CHECKS and not _is_extension(emitted.op):
            return None
        return problem_of(emitted.op, fields_of(emitted.op, emitted.fields), self.env)

    def _apply_form(self, emitted: Emitted, results: dict, producers: dict) -> list[Emitted]:
        """Return the portable instructions for an instruction. Raises Unsupported if there are none."""
        builder, op = self.builder, emitted.op
        if op not in self.forms:
            raise Unsupported("no portable form")
        num_chains = len(builder.chains)
        try:
            with builder.lowering_again(emitted.origin, results, producers) as new:
                outs = self.forms[op].emit(builder, fields_of(op, emitted.fields), self.env)
                names = [f.name for f in op.FIELDS if f.output]
                outs = dict(zip(names, outs if isinstance(outs, list) else [outs], strict=True))
                inner = builder.chains[num_chains:]
                written = {s for chain in (new, *inner) for e in chain for s in written_by(e)}
                for name, out in outs.items():
                    if out is not emitted.fields[name] and out not in written:
                        outs[name] = builder.emit(ir.IdCopyNode, x=out, out=TensorSlot(out.dtype, out.shape))
            for name, out in outs.items():
                _rename([e for chain in (new, *inner) for e in chain], out, emitted.fields[name], op)
            if _is_extension(op):  # its form is mostly a traced function, with any instructions
                return [part for e in new for part in self._lower(e, results, producers)]
            for e in new:
                if self._problem_of(e) is not None:
                    raise Unsupported("the form is not portable")
                self.env.record(e)
            return new
        except Unsupported:
            del builder.chains[num_chains:]
            raise

    def _substitute(self, chain: list[Emitted], emitted: Emitted, new: list[Emitted]) -> None:
        """Record that `emitted` replaces `new`. `emitted` becomes the last of `new`: others may hold it."""
        original = Emitted(emitted.op, emitted.fields, emitted.origin)
        emitted.op, emitted.fields, emitted.expression = new[-1].op, new[-1].fields, None
        new[-1] = emitted
        self.builder.replacements.append(Replacement(chain, new, original))


def _operand_problem(emitted: Emitted) -> Problem | None:
    """Return what is different about an input, output, constant or buffer that an instruction uses, or None."""
    for value in emitted.fields.values():
        for slot in _as_list(value):
            if isinstance(slot, TensorSlot) and slot.space != Space.TEMP:
                if (name := str(slot.dtype).removeprefix("torch.")) not in DTYPES:
                    return Problem("dtype", name)
                if slot.space in (Space.INPUT, Space.BUFFER) and is_empty(slot.shape):
                    return Problem("empty")
                if slot.space == Space.INPUT and slot.order is not None:
                    return Problem("input_order", str(list(slot.order)))
    return None


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def written_by(emitted: Emitted) -> list:
    """Return the slots that an instruction writes, without those that the chains that it runs write."""
    return [v for f in emitted.op.FIELDS if f.output for v in _as_list(emitted.fields.get(f.name))]


def _rename(instructions: list[Emitted], old: Any, new: Any, op: type[ir.Op]) -> None:
    """Write to the slot `new` instead of `old`."""
    if isinstance(new, TensorSlot) and old.dtype != new.dtype:
        raise TypeError(f"{op.__name__}: the portable form returns {old.dtype}, expected {new.dtype}")
    for e in instructions:
        e.expression = None
        e.fields = {name: _renamed(value, old, new) for name, value in e.fields.items()}


def _renamed(value: Any, old: Any, new: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(v, old, new) for v in value]
    return new if value is old else value
