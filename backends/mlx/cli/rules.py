"""What each op makes of what it reads: types by family, as mlx::core has them.

A rule reads its operands through `Env`, and returns a Type, or a list of them for an instruction
with several results. It raises Unknown where it needs what is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..serialization import ir
from .listing import operand
from .types import Env, Shape, Type, Unknown, at_least_float, broadcast, dtype_name, promote

Rule = Callable[[ir.Op, Env], Type | list[Type]]


def _with(shape: Shape, axis: int, extent: int | None) -> Shape:
    if not -len(shape) <= axis < len(shape):
        raise Unknown
    dims = list(shape)
    dims[axis] = extent
    return tuple(dims)


def _product(*dims: int | None) -> int | None:
    return None if None in dims else math.prod(dims)


def _sum(dims: list[int | None]) -> int | None:
    return None if None in dims else sum(dims)


def _dims(list_, t: Env) -> Shape:
    return tuple(t.value(x) for x in list_)


# -- elementwise ---------------------------------------------------------------


def same(field: str = "x") -> Rule:
    return lambda n, t: Type(t.shape(getattr(n, field)), t.dtype(getattr(n, field)))


def floating(n, t):
    return Type(t.shape(n.x), at_least_float(t.dtype(n.x)))


def binary(n, t):
    return Type(broadcast(t.shape(n.a), t.shape(n.b)), promote(t.dtype(n.a), t.dtype(n.b)))


def binary_floating(n, t):
    shape, dtype = binary(n, t)
    return Type(shape, at_least_float(dtype))


def comparison(n, t):
    return Type(broadcast(t.shape(n.a), t.shape(n.b)), "bool")


def where(n, t):
    shape = broadcast(*(t.shape(s) for s in (n.condition, n.x, n.y)))
    return Type(shape, promote(t.dtype(n.x), t.dtype(n.y)))


def clip(n, t):
    sides = [n.x, *(s for s in (n.a_min, n.a_max) if s is not None)]
    return Type(broadcast(*map(t.shape, sides)), promote(*map(t.dtype, sides)))


# -- reductions ----------------------------------------------------------------


def _reduced(n, t) -> Shape:
    shape = t.shape(n.x)
    axes = {a % len(shape) for a in n.axes} if n.axes else set(range(len(shape)))
    return tuple(1 if i in axes else d for i, d in enumerate(shape) if n.keepdims or i not in axes)


def reduction(dtype: Callable[[str | None], str | None]) -> Rule:
    return lambda n, t: Type(_reduced(n, t), dtype(t.dtype(n.x)))


def _summed(dtype: str | None) -> str | None:
    """Sums of narrow integers are made in 32 bits."""
    return {"bool": "int32", "int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}.get(dtype, dtype)


def arg_reduction(n, t):
    shape = t.shape(n.x)
    if not shape:
        return Type((), "uint32")
    reduced = _with(shape, n.axis, 1)
    axis = n.axis % len(shape)
    return Type(reduced if n.keepdims else reduced[:axis] + reduced[axis + 1 :], "uint32")


# -- shapes --------------------------------------------------------------------


def expand_dims(n, t):
    shape = t.shape(n.x)
    axis = n.axis % (len(shape) + 1)
    return Type((*shape[:axis], 1, *shape[axis:]), t.dtype(n.x))


def squeeze(n, t):
    shape = t.shape(n.x)
    asked = {d % len(shape) for d in n.dims} if n.dims else set(range(len(shape)))
    if any(shape[i] is None for i in asked):
        raise Unknown
    gone = {i for i in asked if shape[i] == 1}
    return Type(tuple(d for i, d in enumerate(shape) if i not in gone), t.dtype(n.x))


def reshape(n, t):
    shape, source = _dims(n.shape, t), t.shape(n.x)
    if shape.count(-1) == 1:
        rest, size = _product(*(d for d in shape if d != -1)), _product(*source)
        shape = tuple((size // rest if rest and size is not None else None) if d == -1 else d for d in shape)
    return Type(shape, t.dtype(n.x))


def broadcast_to(n, t):
    source = t.shape(n.x)
    shape = list(_dims(n.shape, t))
    for i, d in enumerate(reversed(shape), 1):
        if d == -1 and i <= len(source):
            shape[-i] = source[-i]
    return Type(tuple(shape), t.dtype(n.x))


def transpose(n, t):
    shape = t.shape(n.x)
    return Type(tuple(shape[p] for p in n.perm), t.dtype(n.x))


def as_strided(n, t):
    return Type(_dims(n.shape, t), t.dtype(n.x))


def tile(n, t):
    shape, reps = t.shape(n.x), _dims(n.reps, t)
    rank = max(len(shape), len(reps))
    shape, reps = (1,) * (rank - len(shape)) + shape, (1,) * (rank - len(reps)) + reps
    return Type(tuple(map(_product, shape, reps)), t.dtype(n.x))


def repeat(n, t):
    shape = t.shape(n.x)
    return Type(_with(shape, n.axis, _product(shape[n.axis], t.value(n.repeats))), t.dtype(n.x))


def split(n, t):
    shape, sizes, parts = t.shape(n.x), list(_dims(n.sizes, t)), len(n.outs)
    if len(sizes) == 1 and parts > 1:  # of each part, and the last is what is left
        width, extent = sizes[0], shape[n.axis]
        rest = None if None in (width, extent) else extent - width * (parts - 1)
        sizes = [width] * (parts - 1) + [rest]
    return [Type(_with(shape, n.axis, size), t.dtype(n.x)) for size in sizes]


def concatenate(n, t):
    shapes = [t.shape(x) for x in n.tensors]
    return Type(_with(shapes[0], n.axis, _sum([s[n.axis] for s in shapes])), promote(*map(t.dtype, n.tensors)))


def stack(n, t):
    shape = t.shape(n.tensors[0])
    axis = n.axis % (len(shape) + 1)
    return Type((*shape[:axis], len(n.tensors), *shape[axis:]), promote(*map(t.dtype, n.tensors)))


def pad(n, t):
    widths = _dims(n.pad_width, t)
    dims = zip(t.shape(n.x), widths[::2], widths[1::2], strict=True)
    return Type(tuple(_sum(list(d)) for d in dims), t.dtype(n.x))


def slice_(n, t):
    shape, axis = t.shape(n.x), t.value(n.axis)
    if axis is None:
        raise Unknown
    length, start, stop = shape[axis], t.value(n.start), t.value(n.stop)
    extent = None
    if None not in (length, start, stop):
        extent = len(range(length)[start : stop : n.step])
    return Type(_with(shape, axis, extent), t.dtype(n.x))


# -- indices -------------------------------------------------------------------


def take(n, t):
    shape, index = t.shape(n.x), operand(n.index)
    axis = n.axis % len(shape)
    between = t.shape(index) if isinstance(index, ir.Tid) else ()
    return Type((*shape[:axis], *between, *shape[axis + 1 :]), t.dtype(n.x))


def take_along_axis(n, t):
    return Type(t.shape(n.indices), t.dtype(n.x))


def gather(n, t):
    indices = broadcast(*map(t.shape, n.indices)) if n.indices else ()
    return Type((*indices, *n.slice_sizes), t.dtype(n.x))


# -- creation ------------------------------------------------------------------


def arange(n, t):
    bounds = [t.value(x) for x in (n.start, n.stop, n.step)]
    count = None if None in bounds or bounds[2] == 0 else len(range(*bounds))
    return Type((count,), "int32" if n.scalar_type is None else dtype_name(n.scalar_type))


def full_like(n, t):
    return Type(t.shape(n.x), t.dtype(n.x) if n.scalar_type is None else dtype_name(n.scalar_type))


def random_bits(n, t):
    return Type(_dims(n.shape, t), {1: "uint8", 2: "uint16", 4: "uint32"}.get(n.width))


# -- products ------------------------------------------------------------------


def _matmul(a: Shape, b: Shape) -> Shape:
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return broadcast(a[:-2], b[:-2]) + rows + columns if len(a) > 2 or len(b) > 2 else rows + columns


def addmm(n, t):
    return Type(_matmul(t.shape(n.mat1), t.shape(n.mat2)), promote(t.dtype(n.mat1), t.dtype(n.mat2)))


def _batch(n, t, a: Shape, b: Shape) -> Shape:
    left = t.shape(n.lhs_indices) if n.lhs_indices is not None else a[:-2]
    right = t.shape(n.rhs_indices) if n.rhs_indices is not None else b[:-2]
    return broadcast(left, right) if left or right else ()


def gather_mm(n, t):
    a, b = t.shape(n.a), t.shape(n.b)
    return Type((*_batch(n, t, a, b), a[-2], b[-1]), t.dtype(n.a))


def _columns(n, t) -> int | None:
    """Extent of the packed axis when unpacked: 32 bits hold 32 / bits elements."""
    packed = t.shape(n.w)[-1]
    return None if packed is None or not n.bits else packed * 32 // n.bits


def dequantize(n, t):
    dtype = t.dtype(n.scales) if n.dtype is None else dtype_name(n.dtype)
    return Type(_with(t.shape(n.w), -1, _columns(n, t)), dtype)


def quantized_matmul(n, t):
    return Type((*t.shape(n.x)[:-1], t.shape(n.w)[-2] if n.transpose else _columns(n, t)), t.dtype(n.x))


def gather_qmm(n, t):
    x, w = t.shape(n.x), t.shape(n.w)
    columns = w[-2] if n.transpose else _columns(n, t)
    return Type((*_batch(n, t, x, w), x[-2], columns), t.dtype(n.x))


def attention(n, t):
    return Type((*t.shape(n.q)[:-1], t.shape(n.v)[-1]), t.dtype(n.q))


def update_and_attend(n, t):
    return Type(attention(n, t).shape, t.dtype(n.q) if n.out_dtype is None else dtype_name(n.out_dtype))


def convolution(axes: str, transposed: bool = False) -> Rule:
    """x [N, *axes, C], w [O, *axes, I]; `axes` is "" in one dimension, else the suffixes."""

    def rule(n, t):
        x, w = t.shape(n.x), t.shape(n.w)
        extents = []
        for i, suffix in enumerate(f"_{a}" if axes else "" for a in axes or "w"):
            stride, padding, dilation = (getattr(n, f + suffix) for f in ("stride", "padding", "dilation"))
            size, reach = x[1 + i], None if w[1 + i] is None else dilation * (w[1 + i] - 1)
            if size is None or reach is None:
                extents.append(None)
            elif transposed:
                extra = getattr(n, "output_padding" + suffix)
                extents.append((size - 1) * stride - 2 * padding + reach + 1 + extra)
            else:
                extents.append((size + 2 * padding - reach - 1) // stride + 1)
        return Type((x[0], *extents, w[0]), t.dtype(n.x))

    return rule


def _table(*families: tuple[Rule, str]) -> dict[str, Rule]:
    return {name: rule for rule, names in families for name in names.split()}


# What has no rule below but takes one operand and no more, as functions of a number do.
_UNARY = {
    op.NAME.removesuffix("Node"): floating for op in ir.OPS.values() if issubclass(op, ir.UnaryNode)
}

RULES: dict[str, Rule] = _UNARY | _table(
    (same(), "IdCopy Contiguous Abs Neg Sign Square Floor Ceil Trunc BitwiseInvert Round Roll Flip"),
    (same(), "Sort Partition Cumsum Tril Triu RMSNorm LayerNorm Rope ScatterAdd"),
    (same("dst"), "SliceUpdate IndexCopy"),
    (floating, "Gelu Softmax"),
    (lambda n, t: Type(t.shape(n.x), "bool"), "LogicalNot"),
    (lambda n, t: Type(t.shape(n.x), "uint32"), "Argsort ArgPartition"),
    (lambda n, t: Type(t.shape(n.x), dtype_name(n.scalar_type)), "AsType"),
    (binary, "Add Subtract Multiply Maximum Minimum Power Remainder FloorDivide"),
    (binary, "BitwiseAnd BitwiseOr BitwiseXor"),
    (binary_floating, "Divide Atan2 LogAddExp"),
    (comparison, "Equal NotEqual Less LessEqual Greater GreaterEqual LogicalAnd LogicalOr"),
    (where, "Where"),
    (clip, "Clip"),
    (reduction(lambda dtype: "bool"), "All Any"),
    (reduction(lambda dtype: dtype), "Max Min"),
    (reduction(_summed), "Sum Prod"),
    (reduction(at_least_float), "Mean Var Std LogSumExp Median"),
    (arg_reduction, "Argmax Argmin"),
    (expand_dims, "ExpandDims"),
    (squeeze, "Squeeze"),
    (reshape, "Reshape"),
    (broadcast_to, "BroadcastTo"),
    (transpose, "Transpose"),
    (as_strided, "AsStrided"),
    (tile, "Tile"),
    (repeat, "Repeat"),
    (split, "Split"),
    (concatenate, "Concatenate"),
    (stack, "Stack"),
    (pad, "Pad"),
    (slice_, "Slice"),
    (take, "Take"),
    (take_along_axis, "TakeAlongAxis"),
    (gather, "Gather"),
    (arange, "ARange"),
    (lambda n, t: Type(_dims(n.shape, t), dtype_name(n.scalar_type)), "Full"),
    (full_like, "FullLike"),
    (lambda n, t: Type(_dims((n.n, n.m), t), dtype_name(n.scalar_type)), "Tri"),
    (random_bits, "RandomBits"),
    (addmm, "Addmm"),
    (gather_mm, "GatherMm"),
    (dequantize, "Dequantize"),
    (quantized_matmul, "QuantizedMatmul"),
    (gather_qmm, "GatherQmm"),
    (attention, "Sdpa"),
    (update_and_attend, "UpdateAndAttend"),
    (convolution(""), "Conv1D"),
    (convolution("hw"), "Conv2D"),
    (convolution("dhw"), "Conv3D"),
    (convolution("", True), "ConvTranspose1D"),
    (convolution("hw", True), "ConvTranspose2D"),
    (convolution("dhw", True), "ConvTranspose3D"),
)

# Results that share the memory of what they are made of.
VIEWS = set("IdCopy ExpandDims Squeeze Reshape BroadcastTo Transpose AsStrided Slice Split".split())
