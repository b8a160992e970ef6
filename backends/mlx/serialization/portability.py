"""What IR nodes, dtypes, literals and programs mean on ExecuTorch's own MLX delegate, where that differs from here.

`CHECKS` has the differences of instructions, and `program_findings` those of whole programs. docs/interop.md explains
them for users. `builder/portable.py` lowers most of these instructions another way, so that a file that was exported
without extensions rarely has a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import ir
from .infer_types import declared_type, infer_types
from .listing import SlotNames, list_instructions, tensor_ids, unwrap_operand, without_digest
from .types import FLOATS, ITEMSIZE, Env, Type, Unknown, dtype_name

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
MAX_BUFFER_BYTES = 4 << 30
MAX_STEP = 2**30
_FLOAT32_BITS = 24  # the significant bits of a float32

DTYPES = {"bool", "uint8", "int8", "int16", "int32", "int64", "uint32", "float16", "bfloat16", "float32"}
_HALVES = {"float16", "bfloat16"}
_INTEGERS = {"uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
_SIGNED = {"int8", "int16", "int32", "int64"}


@dataclass(frozen=True)
class Kind:
    """A kind of difference. `reason` says what happens there, and `remedy` what the author of a model can do.

    `{0}` in `reason` stands for a detail, such as a dtype.
    """

    reason: str
    remedy: str


_EXPORT_AGAIN = "export the model again with this version"

KINDS: dict[str, Kind] = {
    "extension": Kind("ExecuTorch's own MLX delegate has no {0}", "export without allow_extensions"),
    "metal_source": Kind("programs with Metal source are refused", "use operators that MLX has"),
    "dtype": Kind("{0} is unknown there", "use int32 or int64"),
    "item_bytes": Kind("reads four bytes of a tensor of {0}", f"{_EXPORT_AGAIN}, or cast to int32 before"),
    "integer_quotient": Kind("returns a float that is not rounded down", _EXPORT_AGAIN),
    "zero_divisor": Kind("a divisor of 0 may end the process", f"{_EXPORT_AGAIN}, or use a constant divisor"),
    "integer_power": Kind("never returns if an exponent is negative", f"{_EXPORT_AGAIN}, or use a constant exponent"),
    "literal": Kind("{0} is clamped to int32", "keep sizes, positions and offsets within int32"),
    "fill_value": Kind("rounds {0} to float32", _EXPORT_AGAIN),
    "empty": Kind("a tensor without elements is refused", "leave out tensors with a dimension of 0"),
    "scalar_operand": Kind("a 0-d tensor is refused", f"{_EXPORT_AGAIN}, or reshape to one dimension"),
    "all_axes": Kind("reduces no axis if the list of axes is empty", _EXPORT_AGAIN),
    "half_precision": Kind(
        "computes in {0}, in which sums lose digits or overflow", f"{_EXPORT_AGAIN}, or cast to float32 before"
    ),
    "scale_without_bias": Kind("ignores alpha without a bias", _EXPORT_AGAIN),
    "constant_update": Kind("a constant cannot be updated", f"{_EXPORT_AGAIN}, or copy the constant before"),
    "copied_indices": Kind("reads indices as contiguous int64, but got {0}", _EXPORT_AGAIN),
    "scatter_shape": Kind("the operands must have the same shape, except for x on the axis", _EXPORT_AGAIN),
    "long_step": Kind("the step {0} overflows", "use a step below 2^30"),
    "flat_roll": Kind("rolls no axis if the list of axes is empty", _EXPORT_AGAIN),
    "conv_groups": Kind("{0} groups over three axes are refused", _EXPORT_AGAIN),
    "conv_padding": Kind("padding beyond the window gives another shape", _EXPORT_AGAIN),
    # of whole programs
    "value_input": Kind("a number of kind {0} as input is refused", "pass a 0-d tensor"),
    "value_output": Kind("a number of kind {0} as output is refused", "return a 0-d tensor"),
    "large_buffer": Kind("a buffer of more than 4 GiB is refused", "split the buffer"),
    "initial_value": Kind("the buffer starts from zero: its initial value is not read", _EXPORT_AGAIN),
    "input_order": Kind("an input must be row-major, but got dim_order {0}", "pass x.contiguous()"),
    "output_order": Kind("the result is copied in row-major order, but expected dim_order {0}", _EXPORT_AGAIN),
    "shared_state": Kind(
        "shared by methods {0} here, but each method has its own there",
        "export one method, as `executorch-mlx export --portable` does",
    ),
}


@dataclass(frozen=True)
class Problem:
    """A difference in one instruction or program. `detail` completes the reason of its kind."""

    kind: str
    detail: str = ""

    @property
    def reason(self) -> str:
        return KINDS[self.kind].reason.format(self.detail)

    @property
    def remedy(self) -> str:
        return KINDS[self.kind].remedy

    def __str__(self) -> str:
        return f"{self.reason}; {self.remedy}"


Check = Callable[[Any, Env], Problem | None]
"""`check(n, env)` returns what is different about the instruction `n`, or None. `n` has the fields of an IR node. `env`
has the types of its operands, and knows which slots are constants. The check may raise Unknown."""


# -- checks of single nodes --------------------------------------------------------


def _item_bytes(n, env):
    number = env.known_value(n.x)
    if number is not None and not INT32_MIN <= number <= INT32_MAX:
        return Problem("literal", str(number))
    dtype = env.dtype(n.x)
    is_read_whole = dtype is None or dtype not in FLOATS and ITEMSIZE[dtype] >= 4
    return None if is_read_whole else Problem("item_bytes", dtype)


def _integer_quotient(n, env):
    return Problem("integer_quotient") if _is_integer(env, n.a, n.b) else None


def _zero_divisor(n, env):
    return Problem("zero_divisor") if _is_integer(env, n.a, n.b) and not env.is_guarded(n.b) else None


def _integer_power(n, env):
    is_signed = env.dtype(n.b) in _SIGNED and env.dtype(n.a) not in FLOATS
    return Problem("integer_power") if is_signed and not env.is_constant(n.b) else None


def _is_integer(env: Env, *tensors) -> bool:
    return all(env.dtype(t) in _INTEGERS or env.dtype(t) == "bool" for t in tensors)


def _int32_literals(*fields: str) -> Check:
    """Return a check of fields that hold integers or lists of integers."""

    def check(n, env):
        for field in fields:
            value = getattr(n, field)
            for v in value if isinstance(value, list) else [value]:
                number = unwrap_operand(v)
                if isinstance(number, int) and not INT32_MIN <= number <= INT32_MAX:
                    return Problem("literal", str(number))
        return None

    return check


def _fill_value(n, env):
    dtype = dtype_name(n.scalar_type) if n.scalar_type is not None else env.dtype(n.x)
    value = unwrap_operand(n.v)
    if dtype in FLOATS or dtype == "bool":
        return None
    if not isinstance(value, (int, float)):
        return Problem("fill_value", "integers beyond 2^24")
    number = abs(int(value))
    lowest_bit = number & -number
    is_exact = number.bit_length() - lowest_bit.bit_length() < _FLOAT32_BITS
    return None if is_exact else Problem("fill_value", str(int(value)))


def _static_sizes(*fields: str) -> Check:
    """Return a check that no size in `fields` is 0."""

    def check(n, env):
        for field in fields:
            value = getattr(n, field)
            for v in value if isinstance(value, list) else [value]:
                if env.may_be_empty(v):
                    return Problem("empty")
        return None

    return check


def _nonempty_range(n, env):
    start, stop, step = (unwrap_operand(v) for v in (n.start, n.stop, n.step))
    if all(isinstance(v, int) for v in (start, stop, step)):
        return Problem("empty") if step and not len(range(start, stop, step)) else None
    return Problem("empty") if start == 0 and step == 1 and env.may_be_empty(n.stop) else None


def _nonempty(n, env):
    """A check that the operand x has elements."""
    return Problem("empty") if 0 in env.shape(n.x) else None


def _nonempty_result(n, env):
    repeats = unwrap_operand(n.repeats)
    return Problem("empty") if repeats == 0 or 0 in env.shape(n.x) else None


def _not_scalar(n, env):
    return Problem("scalar_operand") if env.shape(n.x) == () else None


def _all_axes(n, env):
    return Problem("all_axes") if not n.axes and env.shape(n.x) != () else None


def _float32_sums(n, env):
    dtype = env.dtype(n.x)
    return Problem("half_precision", dtype) if dtype in _HALVES else None


def _scale_without_bias(n, env):
    return Problem("scale_without_bias") if n.bias is None and n.alpha != 1.0 else None


def _constant_update(n, env):
    return Problem("constant_update") if env.is_constant(n.dst) else None


def _copied_indices(n, env):
    dtype = env.dtype(n.indices)
    if dtype not in (None, "int64"):
        return Problem("copied_indices", dtype)
    return None if env.is_contiguous(n.indices) else Problem("copied_indices", "a view")


def _scatter_shape(n, env):
    shapes = [env.shape(t) for t in (n.x, n.indices, n.updates)]
    is_same = len({len(s) for s in shapes}) == 1 and env.same_extents(n.indices, n.updates)
    is_same = is_same and env.same_extents(n.x, n.indices, except_axis=n.axis % len(shapes[0]))
    return None if is_same else Problem("scatter_shape")


def _scatter_nonempty(n, env):
    return Problem("empty") if 0 in env.shape(n.indices) or 0 in env.shape(n.x) else None


def _short_step(n, env):
    return Problem("long_step", str(n.step)) if abs(n.step) > MAX_STEP else None


def _rolled_axes(n, env):
    return None if n.axes else Problem("flat_roll")


def _known_size(n, env):
    """A check that a size of -1 stands for the number of some elements."""
    is_inferred = any(unwrap_operand(size) == -1 for size in n.shape)
    return Problem("empty") if is_inferred and 0 in env.shape(n.x) else None


def _one_group(n, env):
    return Problem("conv_groups", str(n.groups)) if n.groups != 1 else None


def _padding_within_window(*suffixes: str) -> Check:
    def check(n, env):
        for extent, suffix in zip(env.shape(n.w)[1:-1], suffixes, strict=True):
            dilation, padding = getattr(n, "dilation" + suffix), getattr(n, "padding" + suffix)
            if extent is not None and dilation * (extent - 1) < padding:
                return Problem("conv_padding")
        return None

    return check


def _known_dtype(*fields: str) -> Check:
    def check(n, env):
        for field in fields:
            value = getattr(n, field)
            if value is not None and (name := dtype_name(value)) not in DTYPES:
                return Problem("dtype", name or f"ScalarType {value}")
        return None

    return check


def _float16_sigmoid(n, env):
    """1 + exp(-x) overflows there below -11, so that the result is 0."""
    return Problem("half_precision", "float16") if env.dtype(n.x) == "float16" else None


_SIZES = _int32_literals("shape")
_ARITHMETIC = (_int32_literals("a", "b"),)

CHECKS: dict[type[ir.Op], tuple[Check, ...]] = {
    # scalar
    ir.ItemIntNode: (_item_bytes,),
    **dict.fromkeys(
        (ir.AddIntNode, ir.SubtractIntNode, ir.MultiplyIntNode, ir.FloorDivideIntNode, ir.ModIntNode), _ARITHMETIC
    ),
    # elementwise
    ir.FloorDivideNode: (_integer_quotient,),
    ir.RemainderNode: (_zero_divisor,),
    ir.PowerNode: (_integer_power,),
    ir.GeluNode: (_float32_sums,),
    **dict.fromkeys((ir.SigmoidNode, ir.SiluNode), (_float16_sigmoid,)),
    ir.AsTypeNode: (_known_dtype("scalar_type"),),
    # create
    ir.FullNode: (_known_dtype("scalar_type"), _SIZES, _static_sizes("shape"), _fill_value),
    ir.FullLikeNode: (_known_dtype("scalar_type"), _fill_value),
    ir.ARangeNode: (_known_dtype("scalar_type"), _int32_literals("start", "stop", "step"), _nonempty_range),
    ir.TriNode: (_known_dtype("scalar_type"), _static_sizes("n", "m")),
    ir.RandomBitsNode: (_static_sizes("shape"),),
    # shape and index
    ir.RepeatNode: (_nonempty_result,),
    ir.RollNode: (_int32_literals("shift"), _rolled_axes),
    ir.ReshapeNode: (_known_size,),
    ir.TakeNode: (_nonempty,),
    ir.GatherNode: (_static_sizes("slice_sizes"),),
    ir.SliceNode: (_short_step,),
    ir.SliceUpdateNode: (_constant_update, _short_step),
    ir.IndexCopyNode: (_constant_update, _copied_indices),
    ir.ScatterAddNode: (_scatter_nonempty, _scatter_shape),
    # reductions and sorting
    **dict.fromkeys((ir.SumNode, ir.MeanNode, ir.ProdNode, ir.VarNode, ir.StdNode), (_float32_sums,)),
    ir.LogSumExpNode: (_nonempty, _all_axes),
    **dict.fromkeys((ir.ArgmaxNode, ir.ArgminNode), (_not_scalar, _nonempty)),
    **dict.fromkeys((ir.SortNode, ir.ArgsortNode, ir.PartitionNode, ir.ArgPartitionNode), (_not_scalar,)),
    ir.CumsumNode: (_not_scalar, _float32_sums),
    # linear algebra, normalization, attention
    ir.AddmmNode: (_scale_without_bias,),
    ir.SoftmaxNode: (_not_scalar,),
    ir.DequantizeNode: (_known_dtype("dtype"),),
    ir.UpdateAndAttendNode: (_known_dtype("out_dtype"),),
    # conv
    ir.Conv3DNode: (_one_group,),
    ir.ConvTranspose1DNode: (_padding_within_window(""),),
    ir.ConvTranspose2DNode: (_padding_within_window("_h", "_w"),),
    ir.ConvTranspose3DNode: (_one_group, _padding_within_window("_d", "_h", "_w")),
    # control
    ir.MetalKernelNode: (lambda n, env: Problem("metal_source"),),
}


def problem_of(op: type[ir.Op], n: Any, env: Env) -> Problem | None:
    """Return the first difference of the instruction `n` of the node `op`, or None. See `Check` for `n` and `env`."""
    if op.OP_TYPE >= ir.FIRST_EXTENSION:
        return Problem("extension", op.NAME)
    for check in CHECKS.get(op, ()):
        try:
            problem = check(n, env)
        except Unknown:
            continue
        if problem is not None:
            return problem
    return None


# -- checks of whole programs ------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """A difference in a program: `where` names the instruction or the slot, and `problem` says what is different."""

    where: str
    problem: Problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


# Nodes whose result may have gaps, or another order in memory than its shape says. Some of them return their operand.
STRIDED_VIEWS = {
    ir.IdCopyNode,
    ir.ReshapeNode,
    ir.SqueezeNode,
    ir.ExpandDimsNode,
    ir.BroadcastToNode,
    ir.TransposeNode,
    ir.AsStridedNode,
    ir.SliceNode,
    ir.SplitNode,
    ir.FlipNode,
    ir.TakeNode,
}


class _GraphEnv(Env):
    """The types of the operands of one instruction of a finished program."""

    def __init__(self, types: dict[int, Type], constants: range, producers: dict[int, type[ir.Op]]):
        super().__init__(types, {})
        self._constants, self._producers = constants, producers

    def is_constant(self, slot: ir.Tid) -> bool:
        return slot.idx in self._constants

    def is_contiguous(self, slot: ir.Tid) -> bool:
        return self._producers.get(slot.idx) not in STRIDED_VIEWS

    def is_guarded(self, slot: ir.Tid) -> bool:
        return self.is_constant(slot) or self._producers.get(slot.idx) is ir.WhereNode


def program_findings(graph: ir.MLXGraph, stored: Collection[str] = ()) -> list[Finding]:
    """Return what is different about a program there. `stored` has the keys of the file's named data."""
    return [*_interface_findings(graph), *_buffer_findings(graph, stored), *_instruction_findings(graph)]


def _instruction_findings(graph: ir.MLXGraph) -> Iterator[Finding]:
    names, constants = SlotNames(graph), tensor_ids(graph)["constant"]
    producers: dict[int, type[ir.Op]] = {}
    for typed in infer_types(graph):
        instruction, node = typed.instruction, typed.instruction.node
        is_init = instruction.chain == graph.init_chain_idx
        env = _GraphEnv(typed.operands, range(0) if is_init else constants, producers)
        problem = problem_of(type(node), node, env)
        producers |= {slot.idx: type(node) for slot in instruction.results if isinstance(slot, ir.Tid)}
        if problem is not None:
            results = ", ".join(names(s) for s in instruction.results)
            where = f"{results + ' = ' if results else ''}{instruction.op}"
            yield Finding(f"{where} (chain {instruction.chain}, instruction {instruction.index})", problem)


def _interface_findings(graph: ir.MLXGraph) -> Iterator[Finding]:
    names = SlotNames(graph)
    for kind, slots in (("value_input", graph.input_map), ("value_output", graph.output_map)):
        for slot in slots or ():
            if slot.slot_type in (ir.SlotType.FloatValueSlot, ir.SlotType.BoolValueSlot):
                number = slot.slot_type.name.removesuffix("ValueSlot").lower()
                yield Finding(names(ir.Vid(slot.idx)), Problem(kind, number))
    ids = tensor_ids(graph)
    for tid, meta in enumerate(graph.tensor_meta or ()):
        type_ = declared_type(meta)
        if type_.dtype not in DTYPES:
            yield Finding(names(ir.Tid(tid)), Problem("dtype", type_.dtype or f"ScalarType {meta.scalar_type}"))
        if (tid in ids["input"] or tid in ids["buffer"]) and 0 in type_.shape:
            yield Finding(names(ir.Tid(tid)), Problem("empty"))


def _buffer_findings(graph: ir.MLXGraph, stored: Collection[str]) -> Iterator[Finding]:
    names = SlotNames(graph)
    init = graph.init_chain_idx
    chains = list_instructions(graph)
    written = {s.idx for i in chains[init] for s in i.results} if 0 <= init < len(chains) else set()
    for slot in graph.mutable_buffer_map or ():
        key = names.keys.get(slot.idx)
        name = names(ir.Tid(slot.idx)) if key is None else without_digest(key)
        nbytes = declared_type(graph.tensor_meta[slot.idx]).nbytes
        if nbytes is not None and nbytes > MAX_BUFFER_BYTES:
            yield Finding(name, Problem("large_buffer"))
        if key in stored and slot.idx not in written:
            yield Finding(name, Problem("initial_value"))


def shared_buffers(graphs: Mapping[str, list[ir.MLXGraph]]) -> list[Finding]:
    """Return a finding for the buffers that the same methods share here. `graphs` has the programs of each method."""
    methods: dict[str, dict[str, None]] = {}
    for method, programs in graphs.items():
        for graph in programs:
            keys = SlotNames(graph).keys
            for slot in graph.mutable_buffer_map or ():
                if slot.idx in keys:
                    methods.setdefault(keys[slot.idx], {})[method] = None
    shared: dict[tuple[str, ...], list[str]] = {}
    for key, users in methods.items():
        if len(users) > 1:
            shared.setdefault(tuple(users), []).append(without_digest(key))
    return [Finding(abbreviated(names), Problem("shared_state", ", ".join(users))) for users, names in shared.items()]


def abbreviated(names: list[str]) -> str:
    """Return the first name, and how many others there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
