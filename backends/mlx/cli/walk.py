"""Walks a program without running it: what every instruction makes, and what lives when."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..serialization import ir
from .listing import Row, rows, spaces
from .rules import RULES, VIEWS
from .types import Env, Type, Unknown, dtype_name

_INTEGERS = {
    "AddInt": lambda a, b: a + b,
    "SubtractInt": lambda a, b: a - b,
    "MultiplyInt": lambda a, b: a * b,
    "FloorDivideInt": lambda a, b: a // b if b else None,
    "ModInt": lambda a, b: a % b if b else None,
}


@dataclass
class Step:
    """An instruction as it is met, `ends_with` the step that runs it again, if one does."""

    row: Row
    results: list[Type] = field(default_factory=list)
    operands: dict[int, Type] = field(default_factory=dict)
    ends_with: Step | None = None


def persistent_type(meta: ir.TensorMeta, largest: bool = False) -> Type:
    """The type of a tensor that is not temporary; at its largest, dynamic extents are at their bounds."""
    dims = []
    for d in meta.shape:
        bound = d.max_value if largest and d.max_value >= 0 else None
        dims.append(d.value if d.value >= 0 else bound)
    return Type(tuple(dims), dtype_name(meta.scalar_type))


def walk(graph: ir.MLXGraph, largest: bool = False) -> list[Step]:
    """Every instruction that a load and a call can run, in order; both branches of an if."""
    return _Walk(graph, largest).steps


class _Walk:
    def __init__(self, graph: ir.MLXGraph, largest: bool):
        self.chains = rows(graph)
        self.steps: list[Step] = []
        self._open: list[int] = []
        self._scans: list[Step] = []
        meta = enumerate(graph.tensor_meta or ())
        outputs = spaces(graph)[2]
        self.known = {tid: persistent_type(m, largest) for tid, m in meta}
        self.env = Env({tid: t for tid, t in self.known.items() if tid not in outputs}, {})
        for chain in (graph.init_chain_idx, graph.main_chain_idx):
            if 0 <= chain < len(self.chains):
                self._chain(chain)

    def _chain(self, index: int) -> None:
        if index in self._open or not 0 <= index < len(self.chains):
            return  # only a damaged program has these
        self._open.append(index)
        for row in self.chains[index]:
            self._row(row)
        self._open.pop()

    def _row(self, row: Row) -> None:
        step = Step(row, ends_with=self._scans[0] if self._scans else None)
        step.operands = {s.idx: self.env.types.get(s.idx, Type()) for s in row.reads() if isinstance(s, ir.Tid)}
        if row.op == "If":
            self.steps.append(step)
            self._branches(row)
        elif row.op == "While":
            self.steps.append(step)
            for chain in row.chains:
                self._chain(chain)
        elif row.op == "Scan":
            self._scan(row, step)
            self.steps.append(step)
        else:
            self.steps.append(step)
            if row.results and isinstance(row.results[0], ir.Vid):
                self.env.values[row.results[0].idx] = self._number(row)
            else:
                self._write(row.results, self._infer(row), step)

    def _infer(self, row: Row) -> list[Type]:
        rule = RULES.get(row.op)
        try:
            made = rule(row.node, self.env) if rule else []
        except (Unknown, IndexError, ValueError, ZeroDivisionError):  # not known, or a program that will not run
            made = []
        return made if isinstance(made, list) else [made]

    def _write(self, slots: list, types: list[Type], step: Step) -> None:
        types = types + [Type()] * (len(slots) - len(types))
        step.results = [self._refined(slot.idx, t) for slot, t in zip(slots, types)]
        self.env.types |= {slot.idx: t for slot, t in zip(slots, step.results)}

    def _refined(self, tid: int, type_: Type) -> Type:
        """What was inferred, or else what the program itself says of an output or a buffer."""
        declared = self.known.get(tid)
        if declared is None:
            return type_
        shape = type_.shape
        if shape is None or None in shape:
            shape = declared.shape
        return Type(shape, type_.dtype or declared.dtype)

    def _number(self, row: Row) -> int | None:
        if row.op == "SymSize":
            shape = self.env.types.get(row.node.a.idx, Type()).shape
            return shape[row.node.dim] if shape and -len(shape) <= row.node.dim < len(shape) else None
        if row.op in _INTEGERS:
            a, b = self.env.value(row.node.a), self.env.value(row.node.b)
            return None if a is None or b is None else _INTEGERS[row.op](a, b)
        return None  # ItemInt: data

    def _branches(self, row: Row) -> None:
        before = self.env
        after = []
        for chain in row.chains:
            self.env = Env(dict(before.types), dict(before.values))
            self._chain(chain)
            after.append(self.env)
        self.env = Env(
            {tid: _either(*(e.types.get(tid, Type()) for e in after)) for e in after for tid in e.types},
            {vid: after[0].values[vid] for vid in after[0].values if all(e.values.get(vid) == after[0].values[vid] for e in after)},
        )

    def _scan(self, row: Row, step: Step) -> None:
        node = row.node
        steps = None
        for original, sliced in zip(node.originals, node.sliced):
            type_ = self.env.types.get(original.idx, Type())
            if type_.shape is not None and -len(type_.shape) <= node.scan_axis < len(type_.shape):
                axis = node.scan_axis % len(type_.shape)
                steps = type_.shape[axis]
                type_ = Type(type_.shape[:axis] + type_.shape[axis + 1 :], type_.dtype)
            self.env.types[sliced.idx] = type_
        self._scans.append(step)
        for chain in row.chains:
            self._chain(chain)
        self._scans.pop()
        types = []
        for out in node.outputs:
            one = self.env.types.get(out.idx, Type())
            if one.shape is not None and -len(one.shape) - 1 <= node.scan_axis <= len(one.shape):
                axis = node.scan_axis % (len(one.shape) + 1)
                one = Type((*one.shape[:axis], steps, *one.shape[axis:]), one.dtype)
            types.append(one)
        row.results = [*node.outputs, *node.sliced]
        self._write(row.results, types + [self.env.types[s.idx] for s in node.sliced], step)


def _either(a: Type, b: Type) -> Type:
    shape = None
    if a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape):
        shape = tuple(x if x == y else None for x, y in zip(a.shape, b.shape))
    return Type(shape, a.dtype if a.dtype == b.dtype else None)


@dataclass(frozen=True)
class Peak:
    """The most bytes that temporaries take at one time, and how many results were left out
    because their size is not known before a call. `at` is the row where it happens."""

    nbytes: int
    unknown: int
    at: Row | None


def peak_of_temporaries(graph: ir.MLXGraph) -> Peak:
    """An estimate: every result a block of its own, views apart, made and dropped in program order.

    Dynamic extents are at their upper bounds. MLX evaluates lazily, fuses, and writes results over
    operands that nobody needs any more: what it takes is often less.
    """
    steps = walk(graph, largest=True)
    position = {id(step): i for i, step in enumerate(steps)}
    temporaries = spaces(graph)[4]
    block: dict[int, int] = {}  # temporary → the block it is in
    sizes: list[int] = []
    born: list[int] = []
    last: list[int] = []
    unknown = 0
    for i, step in enumerate(steps):
        end = max(i, position[id(step.ends_with)]) if step.ends_with else i
        read = [s.idx for s in step.row.reads() if isinstance(s, ir.Tid) and s.idx in block]
        for tid in read:
            last[block[tid]] = max(last[block[tid]], end)
        shared = block[read[0]] if step.row.op in VIEWS and read else None
        for slot, type_ in zip(step.row.results, step.results):
            if slot.idx not in temporaries:
                continue
            if step.row.op in VIEWS:
                if shared is None:
                    block.pop(slot.idx, None)  # of a constant, an input or a buffer
                else:
                    block[slot.idx] = shared
                continue
            unknown += type_.nbytes is None
            block[slot.idx] = len(sizes)
            sizes.append(type_.nbytes or 0)
            born.append(i)
            last.append(end)
    change = [0] * (len(steps) + 1)
    for size, first, final in zip(sizes, born, last):
        change[first] += size
        change[final + 1] -= size
    best, at, now = 0, None, 0
    for i, step in enumerate(steps):
        now += change[i]
        if now > best:
            best, at = now, step.row
    return Peak(best, unknown, at)
