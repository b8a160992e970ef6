"""Infers the types of all results of an MLX program without running the program."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from . import ir
from .limits import MAX_INFERENCE_STEPS, MAX_INTEGER, MAX_NESTING, MAX_RANK, ProgramError
from .listing import ListedInstruction, list_instructions, tensor_ids
from .type_rules import rule_of
from .types import Env, Type, Unknown, dtype_name

_INTEGER_OPS = {
    ir.AddIntNode: operator.add,
    ir.SubtractIntNode: operator.sub,
    ir.MultiplyIntNode: operator.mul,
    ir.FloorDivideIntNode: lambda a, b: a // b if b else None,
    ir.ModIntNode: lambda a, b: a % b if b else None,
}


@dataclass
class TypedInstruction:
    """An instruction with the types of its tensors, by slot id.

    `inferred` has the types of the results, as the type rule of the IR node computes them. `results` has the same
    types, but each of them is completed from the type that the program declares for the tensor: an unknown dtype is
    replaced by the declared one, and a shape with an unknown extent by the whole declared shape.
    `outer_scan` is the outermost scan that repeats the instruction, or None if no scan does.
    """

    instruction: ListedInstruction
    operands: dict[int, Type] = field(default_factory=dict)
    inferred: dict[int, Type] = field(default_factory=dict)
    results: dict[int, Type] = field(default_factory=dict)
    outer_scan: TypedInstruction | None = None


def declared_type(meta: ir.TensorMeta, upper_bound: bool = False) -> Type:
    """Return the type that a program declares for a tensor.

    A dynamic extent is None. With `upper_bound`, it is the upper bound of the extent instead, if there is one.
    """
    dims = []
    for d in meta.shape:
        bound = d.max_value if upper_bound and d.max_value >= 0 else None
        dims.append(d.value if d.value >= 0 else bound)
    return Type(tuple(dims), dtype_name(meta.scalar_type))


def infer_types(graph: ir.MLXGraph, upper_bound: bool = False) -> list[TypedInstruction]:
    """Return every instruction that can run when the program is loaded or called, with its types.

    The instructions are in order, except that a scan comes after the instructions of its body. The instructions of both
    branches of an if are included. With `upper_bound`, each dynamic extent in a declared type is set to its upper
    bound. Raises ProgramError if the chains are nested deeper than the runtime accepts, or if the inference takes more
    than `MAX_INFERENCE_STEPS` steps.
    """
    return _Inference(graph, upper_bound).run()


class _Inference:
    def __init__(self, graph: ir.MLXGraph, upper_bound: bool):
        self.entry_chains = (graph.init_chain_idx, graph.main_chain_idx)
        self.chains = list_instructions(graph)
        self.typed: list[TypedInstruction] = []
        self.open_chains: list[int] = []
        self.open_scans: list[TypedInstruction] = []
        self.steps = 0
        outputs = tensor_ids(graph)["output"]
        self.declared = {tid: declared_type(m, upper_bound) for tid, m in enumerate(graph.tensor_meta or ())}
        self.env = Env({tid: t for tid, t in self.declared.items() if tid not in outputs}, {})

    def run(self) -> list[TypedInstruction]:
        for chain in self.entry_chains:
            self._chain(chain)
        return self.typed

    def _chain(self, index: int) -> None:
        if index in self.open_chains or not 0 <= index < len(self.chains):
            return  # no init chain, or a damaged program
        if len(self.open_chains) == MAX_NESTING:
            raise ProgramError(f"chain {index}: expected at most {MAX_NESTING} nested chains")
        self.open_chains.append(index)
        for instruction in self.chains[index]:
            self._instruction(instruction)
        self.open_chains.pop()

    def _spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps > MAX_INFERENCE_STEPS:
            raise ProgramError(f"the chains expand to more than {MAX_INFERENCE_STEPS} instructions and operands")

    def _instruction(self, instruction: ListedInstruction) -> None:
        self._spend(instruction.num_steps)
        tids = [s.idx for s in instruction.slots_read() if isinstance(s, ir.Tid)]
        outer_scan = self.open_scans[0] if self.open_scans else None
        typed = TypedInstruction(instruction, {tid: self.env.type(tid) for tid in tids}, outer_scan=outer_scan)
        if isinstance(instruction.node, ir.ScanNode):
            self._scan(typed)
            self.typed.append(typed)
            return
        self.typed.append(typed)
        if isinstance(instruction.node, ir.IfNode):
            self._branches(instruction)
        elif isinstance(instruction.node, ir.WhileNode):
            for chain in instruction.chains:
                self._chain(chain)
        elif instruction.results and isinstance(instruction.results[0], ir.Vid):
            self.env.values[instruction.results[0].idx] = self._integer(instruction.node)
        else:
            types = self._apply_rule(instruction.node)
            types += [Type()] * (len(instruction.results) - len(types))
            self._write(typed, dict(zip((s.idx for s in instruction.results), types)))

    def _apply_rule(self, node: ir.Op) -> list[Type]:
        rule = rule_of(type(node))
        try:
            types = rule(node, self.env) if rule else []
        except (Unknown, IndexError, ValueError, ArithmeticError):  # unknown operands, or a damaged program
            types = []
        return types if isinstance(types, list) else [types]

    def _write(self, typed: TypedInstruction, types: dict[int, Type]) -> None:
        types = {tid: _bounded(t) for tid, t in types.items()}
        typed.inferred = types
        typed.results = {tid: self._complete(tid, t) for tid, t in types.items()}
        self.env.types |= typed.results

    def _complete(self, tid: int, type_: Type) -> Type:
        """Return `type_`, completed from the type that the program declares for the tensor.

        An unknown dtype becomes the declared one. A shape with an unknown extent becomes the whole declared shape.
        """
        declared = self.declared.get(tid)
        if declared is None:
            return type_
        shape = type_.shape
        if shape is None or None in shape:
            shape = declared.shape
        return Type(shape, type_.dtype or declared.dtype)

    def _integer(self, node: Any) -> int | None:
        """Return the integer that `node` computes on the host, or None if the integer is unknown before a call."""
        if isinstance(node, ir.SymSizeNode):
            shape = self.env.type(node.a.idx).shape
            return shape[node.dim] if shape and -len(shape) <= node.dim < len(shape) else None
        if type(node) in _INTEGER_OPS:
            a, b = self.env.value(node.a), self.env.value(node.b)
            result = None if a is None or b is None else _INTEGER_OPS[type(node)](a, b)
            return None if result is None or abs(result) > MAX_INTEGER else result
        return None

    def _branches(self, instruction: ListedInstruction) -> None:
        before = self.env
        after = []
        for chain in instruction.chains:
            self._spend(len(before.types) // 16)  # copying 16 types takes about as long as one step
            self.env = Env(dict(before.types), dict(before.values))
            self._chain(chain)
            after.append(self.env)
        first = after[0].values
        self.env = Env(
            {tid: _common(*(e.type(tid) for e in after)) for e in after for tid in e.types},
            {vid: first[vid] for vid in first if all(e.values.get(vid) == first[vid] for e in after)},
        )

    def _scan(self, typed: TypedInstruction) -> None:
        node: Any = typed.instruction.node
        iterations = None
        for original, sliced in zip(node.originals, node.sliced):
            type_ = self.env.type(original.idx)
            if type_.shape is not None and -len(type_.shape) <= node.scan_axis < len(type_.shape):
                axis = node.scan_axis % len(type_.shape)
                iterations = type_.shape[axis]
                type_ = Type(type_.shape[:axis] + type_.shape[axis + 1 :], type_.dtype)
            self.env.types[sliced.idx] = type_
        self.open_scans.append(typed)
        for chain in typed.instruction.chains:
            self._chain(chain)
        self.open_scans.pop()
        types = {sliced.idx: self.env.type(sliced.idx) for sliced in node.sliced}
        for out in node.outputs:
            type_ = self.env.type(out.idx)  # of the result of one iteration
            if type_.shape is not None and -len(type_.shape) - 1 <= node.scan_axis <= len(type_.shape):
                axis = node.scan_axis % (len(type_.shape) + 1)
                type_ = Type((*type_.shape[:axis], iterations, *type_.shape[axis:]), type_.dtype)
            types[out.idx] = type_
        self._write(typed, types)


def _bounded(type_: Type) -> Type:
    """Return `type_`. A shape that no tensor can have, as in a damaged program, becomes unknown."""
    shape = type_.shape
    if shape is not None and (len(shape) > MAX_RANK or any(d is not None and abs(d) > MAX_INTEGER for d in shape)):
        return Type(None, type_.dtype)
    return type_


def _common(a: Type, b: Type) -> Type:
    """Return a type with the parts that `a` and `b` have in common. All other parts are unknown."""
    shape = None
    if a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape):
        shape = tuple(x if x == y else None for x, y in zip(a.shape, b.shape))
    return Type(shape, a.dtype if a.dtype == b.dtype else None)
