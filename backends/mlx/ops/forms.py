"""Portable forms of IR nodes: other instructions for nodes that ExecuTorch's own MLX delegate takes in another sense.

A form `f(P, n, env)` emits instructions and returns the slot of the result. `n` has the fields of the instruction. A
form raises Unsupported if there are no portable instructions. `serialization/portability.py` says which instructions
are not portable, and `builder/portable.py` calls the forms.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..builder import dtypes
from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot, ValueSlot
from ..serialization import ir
from ..serialization.portability import MAX_STEP


def _item(P: Lowering, n, env):
    if env.known_value(n.x) is not None and n.x.dtype.itemsize >= 4:
        raise Unsupported("the number exceeds int32")
    return P.emit(ir.ItemIntNode, x=P.cast(n.x, torch.int32), out=ValueSlot(n.out.kind))


def _sizes(P: Lowering, x: TensorSlot) -> list:
    if x.shape is None:
        raise Unsupported("the shape is unknown")
    return [P.size(x, axis) for axis in range(x.ndim)]


def _safe_divisor(P: Lowering, b: TensorSlot) -> TensorSlot:
    """Return `b` with 1 in place of 0 and -1, by which a processor may not be able to divide every integer."""
    if b.constant_value not in (None, 0, -1):
        return b
    is_unsafe = P.emit(ir.EqualNode, a=b, b=P.scalar(0, b.dtype))
    if b.dtype not in (torch.uint8, torch.uint32):
        is_minus_one = P.emit(ir.EqualNode, a=b, b=P.scalar(-1, b.dtype))
        is_unsafe = P.emit(ir.LogicalOrNode, a=is_unsafe, b=is_minus_one)
    return P.emit(ir.WhereNode, condition=is_unsafe, x=P.scalar(1, b.dtype), y=b)


def _remainder(P: Lowering, n, env):
    """x % 1 and x % -1 are both 0."""
    return P.emit(ir.RemainderNode, a=n.a, b=_safe_divisor(P, n.b))


# Times this factor, a quotient that was rounded to float32 is smaller than the exact one, in magnitude.
_JUST_BELOW_1 = 1 - 2.0**-20


def _integer_quotient(P: Lowering, n, env):
    """Divide integers by float32 estimates: each estimate leaves a rest that is 2^19 times smaller.

    With the exact remainder r of a / b, the last rest minus r is a small multiple of b, so that its rounded quotient is
    exact. Sums and products of integers wrap around, and a rest that is small is right in spite of that.
    """
    a, b = n.a, n.b
    dtype = n.out.dtype

    def as_float(x):
        return P.cast(x, torch.float32)

    def binary(op, x, y):
        return P.emit(op, a=x, b=y)

    remainder = binary(ir.RemainderNode, a, _safe_divisor(P, b))
    divisor = as_float(b)
    bits = torch.iinfo(dtype).bits
    quotient, rest = None, a
    for _ in range(max(0, -(-(bits - 24) // 19))):
        estimate = binary(ir.DivideNode, as_float(rest), divisor)
        estimate = binary(ir.MultiplyNode, estimate, P.scalar(_JUST_BELOW_1, torch.float32))
        estimate = P.cast(estimate, dtype)
        rest = binary(ir.SubtractNode, rest, binary(ir.MultiplyNode, estimate, b))
        quotient = estimate if quotient is None else binary(ir.AddNode, quotient, estimate)
    difference = binary(ir.SubtractNode, as_float(rest), as_float(remainder))
    last = P.cast(P.emit(ir.RoundNode, x=binary(ir.DivideNode, difference, divisor), decimals=0), dtype)
    return last if quotient is None else binary(ir.AddNode, quotient, last)


def _integer_power(P: Lowering, n, env):
    """A negative exponent gives 0, unless the base is 1 or -1: then the sign of the exponent does not matter."""
    a, b = P.cast(n.a, n.out.dtype), P.cast(n.b, n.out.dtype)
    zero, one = P.scalar(0, a.dtype), P.scalar(1, a.dtype)
    is_negative = P.emit(ir.LessNode, a=b, b=zero)
    is_large = P.emit(ir.NotEqualNode, a=P.emit(ir.AbsNode, x=a), b=one)
    vanishes = P.emit(ir.LogicalAndNode, a=is_negative, b=is_large)
    exponent = P.emit(ir.MaximumNode, a=P.emit(ir.AbsNode, x=b), b=zero)
    exponent = P.emit(ir.WhereNode, condition=vanishes, x=zero, y=exponent)
    # MLX computes in int64, because the exponent is unsigned. The lower bits of the power are the same.
    power = P.emit(ir.PowerNode, a=a, b=P.cast(exponent, torch.uint32))
    return P.emit(ir.WhereNode, condition=vanishes, x=zero, y=P.cast(power, a.dtype))


def _empty(P: Lowering, shape: list, dtype: torch.dtype) -> TensorSlot:
    """Return a tensor of static `shape`, of which a size is 0: no elements of a tensor of ones."""
    whole = P.emit(ir.FullNode, shape=[max(1, size) for size in shape], v=0, scalar_type=dtypes.scalar_type(dtype))
    axis = shape.index(0)
    part = P.emit(ir.SliceNode, x=whole, axis=axis, start=0, stop=0)
    if shape.count(0) > 1:
        part = P.emit(ir.ReshapeNode, x=part, shape=shape)
    return part


def _result_if_empty(P: Lowering, n, env) -> TensorSlot | None:
    """Return a tensor like the result if it certainly has no elements."""
    shape = n.out.shape
    is_empty = shape is not None and all(isinstance(e, int) for e in shape) and 0 in shape
    return _empty(P, list(shape), n.out.dtype) if is_empty else None


def _full(P: Lowering, n, env):
    dtype = n.out.dtype
    shape = list(n.shape)
    if any(env.may_be_empty(size) for size in shape):
        if all(isinstance(size, int) for size in shape):
            return _empty(P, shape, dtype)
        enlarged = [_sum(P, s, 1) if env.may_be_empty(s) else s for s in shape]
        out = _fill(P, enlarged, n.v, dtype)
        for axis, size in enumerate(shape):
            if env.may_be_empty(size):
                out = P.emit(ir.SliceNode, x=out, axis=axis, start=0, stop=size)
        return out
    return _fill(P, shape, n.v, dtype)


def _sum(P: Lowering, a, b):
    return a + b if isinstance(a, int) and isinstance(b, int) else P.emit(ir.AddIntNode, a=a, b=b)


def _fill(P: Lowering, shape: list, value, dtype: torch.dtype) -> TensorSlot:
    """Return a tensor filled with `value`, also with an integer that is no float32, as which `FullNode` takes it."""
    scalar_type = dtypes.scalar_type(dtype)
    if dtype.is_floating_point or dtype == torch.bool or isinstance(value, ValueSlot) and value.kind is not int:
        return P.emit(ir.FullNode, shape=shape, v=value, scalar_type=scalar_type)
    if not isinstance(value, ValueSlot):
        number = P.scalar(int(value), dtype)
    else:
        stop = P.emit(ir.AddIntNode, a=value, b=1)
        number = P.emit(ir.ARangeNode, start=value, stop=stop, step=1, scalar_type=scalar_type)
    return P.emit(ir.BroadcastToNode, x=number, shape=shape) if shape else P.emit(ir.ReshapeNode, x=number, shape=[])


def _full_like(P: Lowering, n, env):
    return _fill(P, _sizes(P, n.x), n.v, n.out.dtype)


def _arange(P: Lowering, n, env):
    if not all(isinstance(v, int) for v in (n.start, n.stop, n.step)):
        # One element more, and then all but the last, so that there is always one.
        stop = P.emit(ir.AddIntNode, a=n.stop, b=n.step)
        longer = P.emit(ir.ARangeNode, start=n.start, stop=stop, step=n.step, scalar_type=n.scalar_type)
        return P.emit(ir.SliceNode, x=longer, axis=0, start=0, stop=n.stop)
    numbers = range(n.start, n.stop, n.step)
    dtype = n.out.dtype
    if not numbers:
        return _empty(P, [0], dtype)
    if dtype.is_floating_point:
        raise Unsupported("the range exceeds int32")
    count = P.emit(ir.ARangeNode, start=0, stop=len(numbers), step=1, scalar_type=n.scalar_type)
    scaled = P.emit(ir.MultiplyNode, a=count, b=P.scalar(n.step, dtype))
    return P.emit(ir.AddNode, a=scaled, b=P.scalar(n.start, dtype))


def _roll(P: Lowering, n, env):
    if (empty := _result_if_empty(P, n, env)) is not None:
        return empty
    if not n.axes:
        return _flat_roll(P, n, env)
    extents = [n.x.shape[axis] for axis in n.axes] if n.x.shape is not None else []
    if not extents or not all(isinstance(v, int) for v in [*extents, *n.shift]):
        raise Unsupported("the shift exceeds int32")
    shift = [s % e for s, e in zip(n.shift, extents, strict=True)]
    return P.emit(ir.RollNode, x=n.x, shift=shift, axes=n.axes)


def _flat_roll(P: Lowering, n, env):
    flat = P.emit(ir.RollNode, x=P.emit(ir.ReshapeNode, x=n.x, shape=[-1]), shift=n.shift, axes=[0])
    return P.emit(ir.ReshapeNode, x=flat, shape=_sizes(P, n.x))


def _reshape(P: Lowering, n, env):
    """Reshape a tensor without elements: MLX cannot compute the size that -1 stands for, which is 0."""
    return P.emit(ir.ReshapeNode, x=n.x, shape=[0 if size == -1 else size for size in n.shape])


def _short_step(op: type[ir.Op]) -> Callable:
    """Return the form of nodes with a step that MLX cannot add to a size: every step beyond the size means the same."""

    def form(P: Lowering, n, env):
        fields = {f.name: getattr(n, f.name) for f in op.FIELDS if f.name != "out"}
        return P.emit(op, **fields | {"step": max(-MAX_STEP, min(n.step, MAX_STEP))})

    return form


def _if_empty(P: Lowering, n, env):
    """The form of nodes that refuse a tensor without elements, although the result has none, either."""
    if (empty := _result_if_empty(P, n, env)) is None:
        raise Unsupported("a tensor without elements is refused")
    return empty


def _on_rows(op: type[ir.Op]) -> Callable:
    """Return the form of nodes that work on an axis: 0-d tensors become vectors of one element."""

    def form(P: Lowering, n, env):
        if (empty := _result_if_empty(P, n, env)) is not None:
            return empty
        if env.shape(n.x) != ():
            raise Unsupported("a tensor without elements is refused")
        row = P.emit(ir.ReshapeNode, x=n.x, shape=[1])
        fields = {f.name: getattr(n, f.name) for f in op.FIELDS if f.name not in ("x", "out")}
        result = P.emit(op, x=row, **fields)
        return P.emit(ir.ReshapeNode, x=result, shape=[])

    return form


def _in_float32(op: type[ir.Op]) -> Callable:
    """Return the form of nodes that compute in half precision."""

    def form(P: Lowering, n, env):
        fields = {f.name: getattr(n, f.name) for f in op.FIELDS if f.name not in ("x", "out")}
        return P.cast(P.emit(op, x=P.cast(n.x, torch.float32), **fields), n.out.dtype)

    return form


def _cumsum(P: Lowering, n, env):
    if env.dtype(n.x) in ("float16", "bfloat16") and env.shape(n.x) != () and 0 not in env.shape(n.x):
        return _in_float32(ir.CumsumNode)(P, n, env)
    return _on_rows(ir.CumsumNode)(P, n, env)


def _logsumexp(P: Lowering, n, env):
    shape = env.shape(n.x)
    if 0 not in shape:
        return P.emit(ir.LogSumExpNode, x=n.x, axes=list(range(len(shape))), keepdims=n.keepdims)
    total = P.emit(ir.SumNode, x=P.emit(ir.ExpNode, x=n.x), axes=n.axes, keepdims=n.keepdims)
    return P.emit(ir.LogNode, x=total)


def _addmm(P: Lowering, n, env):
    product = P.emit(ir.AddmmNode, mat1=n.mat1, mat2=n.mat2)
    return P.emit(ir.MultiplyNode, a=product, b=P.scalar(n.alpha, product.dtype))


def _updated_copy(op: type[ir.Op]) -> Callable:
    """Return the form of an update of a constant, or at indices that do not lie in memory as the node expects."""

    def form(P: Lowering, n, env):
        fields = {f.name: getattr(n, f.name) for f in op.FIELDS}
        if op is ir.SliceUpdateNode:
            fields["step"] = min(n.step, MAX_STEP)
        if env.is_constant(n.dst):
            fields["dst"] = P.emit(ir.IdCopyNode, x=n.dst, out=TensorSlot(n.dst.dtype, n.dst.shape))
        if op is ir.IndexCopyNode:
            indices = P.cast(n.indices, torch.int64)
            if not env.is_contiguous(indices):
                indices = P.emit(ir.ContiguousNode, x=indices)
            fields["indices"] = indices
        return P.emit(op, **fields)

    return form


def _scatter_add(P: Lowering, n, env):
    """Add the first elements of `updates`, one for each index, to the first elements of `x`, as torch does."""
    if any(0 in env.shape(t) for t in (n.x, n.indices)):
        return P.emit(ir.IdCopyNode, x=n.x, out=TensorSlot(n.x.dtype, n.x.shape))
    rank = len(env.shape(n.x))
    if rank == 0 or {len(env.shape(n.indices)), len(env.shape(n.updates))} != {rank}:
        raise Unsupported("the operands must have the same number of axes")
    axis = n.axis % rank
    if n.x.shape is None or n.updates.shape is None:
        raise Unsupported("a shape is unknown")
    sizes = _sizes(P, n.indices)
    updates = _corner(P, n.updates, sizes)
    part = _corner(P, n.x, [None if i == axis else size for i, size in enumerate(sizes)])
    total = P.emit(ir.ScatterAddNode, x=part, indices=n.indices, updates=updates, axis=axis)
    # Writes the sum back from the innermost changed axis outwards.
    return _with_corner(P, n.x, total, sizes, axis)


def _corner(P: Lowering, x: TensorSlot, sizes: list) -> TensorSlot:
    """Return the first `sizes[i]` elements of each axis i, or all elements of an axis if the size is None."""
    for axis, size in enumerate(sizes):
        if size is not None and not (isinstance(size, int) and size == x.shape[axis]):
            extent = size if isinstance(size, int) else size.symbol
            part = TensorSlot(x.dtype, (*x.shape[:axis], extent, *x.shape[axis + 1 :]))
            x = P.emit(ir.SliceNode, x=x, axis=axis, start=0, stop=size, out=part)
    return x


def _with_corner(P: Lowering, x: TensorSlot, corner: TensorSlot, sizes: list, skipped: int) -> TensorSlot:
    """Return `x` with `corner` at its beginning: its first `sizes[i]` elements on each axis i, except on `skipped`."""
    axes = [i for i, size in enumerate(sizes) if i != skipped and not (isinstance(size, int) and size == x.shape[i])]
    wholes = [x]  # x, cut to the corner on the first axis, on the first two axes, and so on
    for axis in axes[:-1]:
        wholes.append(_corner(P, wholes[-1], [sizes[i] if i == axis else None for i in range(x.ndim)]))
    for axis, whole in zip(reversed(axes), reversed(wholes[: len(axes)])):
        copy = P.emit(ir.IdCopyNode, x=whole, out=TensorSlot(whole.dtype, whole.shape))
        corner = P.emit(ir.SliceUpdateNode, dst=copy, update=corner, axis=axis, start=0, stop=sizes[axis])
    return corner


def _conv3d_groups(op: type[ir.Op]) -> Callable:
    """Return the form of a convolution over three axes with several groups: a convolution for each of them."""

    def form(P: Lowering, n, env):
        channels, outputs = env.shape(n.x)[-1], env.shape(n.w)[0]
        if n.groups == 1 or channels is None or outputs is None:
            raise Unsupported("the number of channels is unknown")
        fields = {f.name: getattr(n, f.name) for f in op.FIELDS if f.name not in ("x", "w", "out", "groups")}

        def part(x, axis, size, group):
            step = size // n.groups
            return P.emit(ir.SliceNode, x=x, axis=axis, start=group * step, stop=(group + 1) * step)

        results = [
            P.emit(op, x=part(n.x, 4, channels, g), w=part(n.w, 0, outputs, g), **fields) for g in range(n.groups)
        ]
        return P.emit(ir.ConcatenateNode, tensors=results, axis=4)

    return form


def _cropped_conv(op: type[ir.Op], axes: str) -> Callable:
    """Return the form of a transposed convolution with more padding than its window reaches: its result is cropped.

    `axes` names the axes by the letters that end the names of their fields, and is empty for a single axis.
    """

    def form(P: Lowering, n, env):
        fields = {f.name: getattr(n, f.name) for f in op.FIELDS if f.name != "out"}
        padding = {name: fields.pop(name) for name in [f"padding_{a}" for a in axes] or ["padding"]}
        out = P.emit(op, **fields, **dict.fromkeys(padding, 0))
        for axis, width in enumerate(padding.values(), 1):
            if width:
                out = P.emit(ir.SliceNode, x=out, axis=axis, start=width, stop=-width)
        return out

    return form


def _conv_transpose3d(P: Lowering, n, env):
    form = _conv3d_groups(n.op) if n.groups > 1 else _cropped_conv(n.op, "dhw")
    return form(P, n, env)


_FORMS: dict[type[ir.Op], Callable] = {
    ir.ItemIntNode: _item,
    ir.FloorDivideNode: _integer_quotient,
    ir.RemainderNode: _remainder,
    ir.PowerNode: _integer_power,
    **{op: _in_float32(op) for op in (ir.GeluNode, ir.SigmoidNode, ir.SiluNode)},
    ir.FullNode: _full,
    ir.FullLikeNode: _full_like,
    ir.ARangeNode: _arange,
    ir.TriNode: _if_empty,
    ir.RandomBitsNode: _if_empty,
    ir.RepeatNode: _if_empty,
    ir.RollNode: _roll,
    ir.TakeNode: _if_empty,
    ir.GatherNode: _if_empty,
    ir.ReshapeNode: _reshape,
    ir.SliceNode: _short_step(ir.SliceNode),
    ir.SliceUpdateNode: _updated_copy(ir.SliceUpdateNode),
    ir.IndexCopyNode: _updated_copy(ir.IndexCopyNode),
    ir.ScatterAddNode: _scatter_add,
    **{op: _in_float32(op) for op in (ir.SumNode, ir.MeanNode, ir.ProdNode, ir.VarNode, ir.StdNode)},
    ir.LogSumExpNode: _logsumexp,
    **{op: _on_rows(op) for op in (ir.ArgmaxNode, ir.ArgminNode, ir.SortNode, ir.ArgsortNode, ir.SoftmaxNode)},
    ir.CumsumNode: _cumsum,
    ir.AddmmNode: _addmm,
    ir.Conv3DNode: _conv3d_groups(ir.Conv3DNode),
    ir.ConvTranspose1DNode: _cropped_conv(ir.ConvTranspose1DNode, ""),
    ir.ConvTranspose2DNode: _cropped_conv(ir.ConvTranspose2DNode, "hw"),
    ir.ConvTranspose3DNode: _conv_transpose3d,
}

for _op, _form in _FORMS.items():
    REGISTRY.form(_op)(_form)
