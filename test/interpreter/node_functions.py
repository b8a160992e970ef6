"""The functions of nodes that take more than a call of an MLX function: what they do in ExecuTorch's own MLX delegate.

A function takes the node and the call, and returns the result, which goes to the slot `out`. A function that writes its
slots itself returns None.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import torch
from executorch_mlx.custom_ops.primitives import random_bits as bits_of_seed
from executorch_mlx.serialization import ir

from .arrays import from_torch, is_row_major, to_bytes
from .call import Call
from .meaning import Refused, Undefined


def axis_of(axis: int, x: mx.array) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise Refused(f"axis {axis} is out of range for {x.ndim} axes")
    return axis % x.ndim


def bounded(indices: mx.array, length: int) -> mx.array:
    """MLX checks no index: one that is out of bounds reads or writes other memory."""
    if indices.size:
        low, high = int(indices.min().item()), int(indices.max().item())
        if low < -length or high >= length:
            raise Undefined(f"an index in [{low}, {high}] is out of range [{-length}, {length})")
    return indices


# -- elementwise ------------------------------------------------------------------------


def gelu(n: ir.GeluNode, c: Call) -> mx.array:
    """In the dtype of x."""
    x = c.read(n.x)

    def number(value: float) -> mx.array:
        return mx.array(value, x.dtype)

    if n.approximate == "tanh":
        inner = mx.tanh(number(0.7978845608) * (x + number(0.044715) * (x * (x * x))))
    else:
        inner = mx.erf(number(0.7071067812) * x)
    return number(0.5) * (x * (number(1) + inner))


def has_integers(*arrays: mx.array) -> bool:
    return not any(mx.issubdtype(x.dtype, mx.inexact) for x in arrays)


def check_divisor(a: mx.array, b: mx.array) -> None:
    """An integer by 0 depends on the device, and the lowest integer by -1 may end the process."""
    if not has_integers(a, b) or not b.size:
        return
    is_lowest = (a < 0) & (a == mx.negative(a)) if is_signed(a) else mx.array(False)
    minus_one = b == mx.array(-1, b.dtype) if is_signed(b) else mx.array(False)
    if mx.any((b == 0) | (is_lowest & minus_one)).item():
        raise Undefined("integer division by 0, or of the lowest integer by -1")


def is_signed(x: mx.array) -> bool:
    return mx.issubdtype(x.dtype, mx.signedinteger)


def remainder(a: mx.array, b: mx.array) -> mx.array:
    check_divisor(a, b)
    return mx.remainder(a, b)


def floor_divide(a: mx.array, b: mx.array) -> mx.array:
    """Of integers: a float32 quotient that is not rounded, minus 1 if there is a rest and the signs differ."""
    if not has_integers(a):
        return mx.floor_divide(a, b)
    zero = mx.array(0, a.dtype)
    has_rest = remainder(a, b) != zero
    return mx.divide(a, b) - (has_rest & ((a < zero) != (b < zero))).astype(a.dtype)


def power(a: mx.array, b: mx.array) -> mx.array:
    if has_integers(a, b) and is_signed(b) and b.size and mx.any(b < 0).item():
        raise Undefined("a negative integer exponent")
    return mx.power(a, b)


# -- shape ------------------------------------------------------------------------------


def squeeze(n: ir.SqueezeNode, c: Call) -> mx.array:
    """An axis whose size is not 1, or that does not exist, stays."""
    x = c.read(n.x)
    if not n.dims:
        return mx.squeeze(x)
    ones = [d for d in n.dims if -x.ndim <= d < x.ndim and x.shape[d] == 1]
    return mx.squeeze(x, ones) if ones else x


def broadcast_to(n: ir.BroadcastToNode, c: Call) -> mx.array:
    """A size of -1 is that of x."""
    x, shape = c.read(n.x), c.ints(n.shape)
    added = len(shape) - x.ndim
    return mx.broadcast_to(x, [x.shape[i - added] if d == -1 and i >= added else d for i, d in enumerate(shape)])


def split(n: ir.SplitNode, c: Call) -> None:
    """One size is that of each part. The last of several sizes is not read."""
    x, sizes = c.read(n.x), c.ints(n.sizes)
    if len(sizes) == 1:
        if sizes[0] <= 0:
            raise Refused(f"sizes: got {sizes}, expected a positive size")
        ends = list(range(sizes[0], x.shape[n.axis], sizes[0]))
    else:
        ends = [c.meaning.checked(sum(sizes[: i + 1]), "sum of sizes") for i in range(len(sizes) - 1)]
    c.write_all(n.outs, mx.split(x, ends, n.axis))


def pad(n: ir.PadNode, c: Call) -> mx.array:
    widths = c.ints(n.pad_width)
    if len(widths) % 2 or n.mode not in ("constant", "edge"):
        raise Refused(f"got {len(widths)} widths and mode {n.mode!r}")
    value = mx.array(n.constant_value if n.mode == "constant" else 0.0)
    return mx.pad(c.read(n.x), list(zip(widths[::2], widths[1::2])), n.mode, value)


def repeat(n: ir.RepeatNode, c: Call) -> mx.array:
    x, repeats, axis = c.read(n.x), c.int(n.repeats), axis_of(n.axis, c.read(n.x))
    c.meaning.shape([*x.shape[:axis], x.shape[axis] * repeats, *x.shape[axis + 1 :]], x.dtype)
    return mx.repeat(x, repeats, n.axis)


def flip(n: ir.FlipNode, c: Call) -> mx.array:
    x = c.read(n.x)
    return mx.flip(x, n.axes) if n.axes else x


def as_strided(n: ir.AsStridedNode, c: Call) -> mx.array:
    """Of the row-major elements of x. MLX does not check that the view lies within them."""
    x, shape, strides = c.read(n.x), c.ints(n.shape), c.ints(n.strides)
    reach = [stride * (size - 1) for size, stride in zip(shape, strides)]
    lowest, highest = (n.offset + sum(f(r, 0) for r in reach) for f in (min, max))
    if 0 not in shape and not 0 <= lowest <= highest < x.size:
        raise Undefined(f"the view reaches [{lowest}, {highest}] of {x.size} elements")
    return mx.as_strided(x, shape, strides, n.offset)


# -- index ------------------------------------------------------------------------------


def take(n: ir.TakeNode, c: Call) -> mx.array:
    x = c.read(n.x)
    axis = axis_of(n.axis, x)
    if n.index.kind == 2:
        return mx.take(x, bounded(c.read(n.index.tid), x.shape[axis]), axis)
    index = c.value(n.index.vid) if n.index.kind == 1 else c.meaning.clamped(n.index.literal)
    if not -x.shape[axis] <= index < x.shape[axis]:
        raise Refused(f"index {index} is out of range for size {x.shape[axis]}")
    return mx.take(x, index % x.shape[axis], axis)


def take_along_axis(n: ir.TakeAlongAxisNode, c: Call) -> mx.array:
    x = c.read(n.x)
    return mx.take_along_axis(x, bounded(c.read(n.indices), x.shape[axis_of(n.axis, x)]), n.axis)


def gather(n: ir.GatherNode, c: Call) -> mx.array:
    """Slices of `slice_sizes` that start at the indices of `axes`. The result has the axes of an index in front."""
    x = c.read(n.x)
    if len(n.indices) != len(n.axes) or len(n.slice_sizes) != x.ndim or not all(0 <= a < x.ndim for a in n.axes):
        raise Refused(f"got {len(n.indices)} indices, axes {n.axes} and sizes {n.slice_sizes} for {x.ndim} axes")
    c.meaning.shape(n.slice_sizes, x.dtype)
    starts = {a: bounded(c.read(i), x.shape[a]) % x.shape[a] for a, i in zip(n.axes, n.indices)}
    rank = max((i.ndim for i in starts.values()), default=0)
    at = []
    for axis, size in enumerate(n.slice_sizes):
        if size > x.shape[axis]:
            raise Refused(f"slice_sizes: got {size}, expected at most {x.shape[axis]}")
        offsets = mx.arange(size).reshape([1] * rank + [-1 if i == axis else 1 for i in range(x.ndim)])
        start = starts.get(axis)
        at.append(offsets if start is None else start.astype(mx.int32).reshape(*start.shape, *[1] * x.ndim) + offsets)
    return x[tuple(at)] if at else x


def slice_(n: ir.SliceNode, c: Call) -> mx.array:
    """As in Python. Bounds beyond the axis stand for its ends."""
    x = c.read(n.x)
    axis = axis_of(c.int(n.axis), x)
    if n.step == 0:
        raise Refused("step: got 0")
    start, stop = (max(-(2**31), min(c.int(bound), 2**31 - 1)) for bound in (n.start, n.stop))
    return x[(slice(None),) * axis + (slice(start, stop, n.step),)]


def updated(dst: mx.array, axis: int, part: slice, update: mx.array) -> mx.array:
    result = mx.array(dst)  # another array: an assignment changes the one it is made to
    result[(slice(None),) * axis + (part,)] = update
    return result


def slice_update(n: ir.SliceUpdateNode, c: Call) -> mx.array:
    dst, update = c.destination(n.dst), c.read(n.update)
    axis = axis_of(c.int(n.axis), dst)
    if n.step < 1:
        raise Refused(f"step: got {n.step}, expected at least 1")
    start, stop, _ = slice(c.int(n.start), c.int(n.stop)).indices(dst.shape[axis])
    return dst if start == stop else updated(dst, axis, slice(start, stop, n.step), update)


def index_copy(n: ir.IndexCopyNode, c: Call) -> mx.array:
    """int64 indices only, whose memory is read without regard to strides. Each run of indices is a slice update."""
    dst, update, indices = c.destination(n.dst), c.read(n.update), c.read(n.indices)
    if indices.ndim != 1 or indices.dtype != mx.int64:
        raise Refused(f"indices: got {indices.dtype} with {indices.ndim} axes, expected int64 with 1")
    mx.eval(indices)
    if not is_row_major(indices):
        raise Undefined("the indices have gaps in memory, which are read in their place")
    return copied_runs(dst, update, indices.tolist(), axis_of(n.axis, dst))


def copied_runs(dst: mx.array, update: mx.array, indices: list[int], axis: int) -> mx.array:
    length = dst.shape[axis]
    if any(not -length <= i < length for i in indices):
        raise Refused(f"an index is out of range for size {length}")
    indices = [i % length for i in indices]
    first = 0
    for i in range(1, len(indices) + 1):
        if i < len(indices) and indices[i] == indices[i - 1] + 1:
            continue
        whole = first == 0 and i == update.shape[axis]
        part = update if whole else update[(slice(None),) * axis + (slice(first, i),)]
        dst = updated(dst, axis, slice(indices[first], indices[i - 1] + 1), part)
        first = i
    return dst


def scatter_add(n: ir.ScatterAddNode, c: Call) -> mx.array:
    """The updates must have the shape of the indices, up to axes of size 1. So must x, except on the axis."""
    return scattered_sums(c.read(n.x), c.read(n.indices), c.read(n.updates), n.axis)


def scattered_sums(x: mx.array, indices: mx.array, updates: mx.array, axis: int) -> mx.array:
    axis = axis_of(axis, x)
    if indices.ndim != x.ndim:
        raise Refused(f"indices: got {indices.ndim} axes, expected {x.ndim}")
    indices, updates = mx.broadcast_arrays(bounded(indices, x.shape[axis]), updates.astype(x.dtype))
    shape = list(mx.broadcast_shapes(_with(x.shape, axis, 1), _with(indices.shape, axis, 1)))
    x = mx.broadcast_to(x, _with(shape, axis, x.shape[axis]))
    full = _with(shape, axis, indices.shape[axis])
    grid = [mx.arange(size).reshape([-1 if i == a else 1 for i in range(x.ndim)]) for a, size in enumerate(full)]
    grid[axis] = mx.broadcast_to(indices, full)
    return x.at[tuple(grid)].add(mx.broadcast_to(updates, full))


def _with(shape: Sequence[int], axis: int, size: int) -> list[int]:
    return [*shape[:axis], size, *shape[axis + 1 :]]


# -- create -----------------------------------------------------------------------------


def arange(n: ir.ARangeNode, c: Call) -> mx.array:
    start, stop, step = c.int(n.start), c.int(n.stop), c.int(n.step)
    if step == 0:
        raise Refused("step: got 0")
    dtype = mx.int32 if n.scalar_type is None else c.meaning.dtype(n.scalar_type)
    (length,) = c.meaning.shape([len(range(start, stop, step))], dtype)
    return mx.arange(start, stop, step, dtype) if length else mx.zeros([0], dtype)


def filled(shape: Sequence[int], value: float, dtype: mx.Dtype) -> mx.array:
    if mx.issubdtype(dtype, mx.integer) and abs(value) < 2**63:
        number = mx.array(int(value), mx.int64)  # exact: a float32 has 24 bits
    else:
        number = mx.array(value, mx.float32)
    return mx.broadcast_to(number.astype(dtype), shape)


def full(n: ir.FullNode, c: Call) -> mx.array:
    dtype = c.meaning.dtype(n.scalar_type)
    return filled(c.meaning.shape(c.ints(n.shape), dtype), c.float(n.v), dtype)


def full_like(n: ir.FullLikeNode, c: Call) -> mx.array:
    x = c.read(n.x)
    return filled(x.shape, c.float(n.v), x.dtype if n.scalar_type is None else c.meaning.dtype(n.scalar_type))


def tri(n: ir.TriNode, c: Call) -> mx.array:
    dtype = c.meaning.dtype(n.scalar_type)
    return mx.tri(*c.meaning.shape([c.int(n.n), c.int(n.m)], dtype), n.k, dtype)


# -- scalar -----------------------------------------------------------------------------


def item(n: ir.ItemIntNode, c: Call) -> int:
    """The first four bytes of the element, whatever its dtype is, as an int32."""
    x = c.read(n.x)
    if x.size != 1:
        raise Refused(f"x: got {x.size} elements, expected 1")
    if x.itemsize < 4:
        raise Undefined(f"reads 4 bytes of an element of {x.itemsize}")
    return int.from_bytes(to_bytes(x)[:4], "little", signed=True)


def size(n: ir.SymSizeNode, c: Call) -> int:
    a = c.read(n.a)
    return a.shape[axis_of(n.dim, a)]


def divided(a: int, b: int) -> int:
    if b == 0:
        raise Refused("integer division by zero")
    return a // b


def modulo(a: int, b: int) -> int:
    if b == 0:
        raise Refused("integer division by zero")
    return a % b


# -- products, attention, random ----------------------------------------------------------


def addmm(n: ir.AddmmNode, c: Call) -> mx.array:
    """Without a bias, alpha is not read."""
    a, b = c.read(n.mat1), c.read(n.mat2)
    return mx.matmul(a, b) if n.bias is None else mx.addmm(c.read(n.bias), a, b, n.alpha, n.beta)


def is_sorted(n: ir.GatherMmNode | ir.GatherQmmNode, c: Call) -> bool:
    return n.sorted_indices if n.sorted_indices_flag is None else c.int(n.sorted_indices_flag) != 0


def gather_mm(n: ir.GatherMmNode, c: Call) -> mx.array:
    lhs, rhs = c.optional(n.lhs_indices), c.optional(n.rhs_indices)
    return mx.gather_mm(c.read(n.a), c.read(n.b), lhs, rhs, sorted_indices=is_sorted(n, c))


def weights(n, c: Call) -> tuple[mx.array, mx.array, mx.array | None]:
    return c.read(n.w), c.read(n.scales), c.optional(n.biases)


def quantized_matmul(n: ir.QuantizedMatmulNode, c: Call) -> mx.array:
    return mx.quantized_matmul(c.read(n.x), *weights(n, c), n.transpose, n.group_size, n.bits, n.mode)


def gather_qmm(n: ir.GatherQmmNode, c: Call) -> mx.array:
    indices = c.optional(n.lhs_indices), c.optional(n.rhs_indices)
    return mx.gather_qmm(
        c.read(n.x), *weights(n, c), *indices, n.transpose, n.group_size, n.bits, n.mode, sorted_indices=is_sorted(n, c)
    )


def dequantize(n: ir.DequantizeNode, c: Call) -> mx.array:
    dtype = None if n.dtype is None else c.meaning.dtype(n.dtype)
    return mx.dequantize(*weights(n, c), n.group_size, n.bits, n.mode, c.optional(n.global_scale), dtype)


def rope(n: ir.RopeNode, c: Call) -> mx.array:
    freqs = c.optional(n.freqs)
    return mx.fast.rope(
        c.read(n.x),
        n.dims,
        traditional=n.traditional,
        base=n.base if freqs is None else None,
        scale=n.scale,
        offset=c.value(n.offset.vid) if n.offset.is_vid else c.read(n.offset.tid),
        freqs=freqs,
    )


def sdpa(n: ir.SdpaNode, c: Call) -> mx.array:
    q, mask = c.read(n.q), c.optional(n.mask)
    if mask is not None and n.causal:
        raise Refused("mask: expected none if causal is true")
    if mask is not None and mask.dtype != mx.bool_:
        mask = mask.astype(q.dtype)
    return mx.fast.scaled_dot_product_attention(
        q, c.read(n.k), c.read(n.v), scale=n.scale, mask="causal" if n.causal else mask
    )


def random_bits(n: ir.RandomBitsNode, c: Call) -> mx.array:
    """The bits of the key of the seed, extended with its sign to 64 bits; without a seed, any bits."""
    if n.width not in (1, 2, 4):
        raise Refused(f"width: got {n.width}")
    seed = None if n.seed is None else torch.tensor(c.value(n.seed))
    return from_torch(bits_of_seed(c.meaning.shape(c.ints(n.shape), mx.uint32), seed, n.width))


# -- control ----------------------------------------------------------------------------


def if_else(n: ir.IfNode, c: Call) -> None:
    c.run(n.then_chain_idx if c.int(n.cond) != 0 else n.else_chain_idx)


def scan(n: ir.ScanNode, c: Call) -> None:
    results = [[] for _ in n.outputs]
    for i in range(c.read(n.originals[0]).shape[n.scan_axis]):
        for original, sliced in zip(n.originals, n.sliced):
            c.write(sliced, mx.take(c.read(original), i, n.scan_axis))
        c.run(n.body_chain_idx)
        for collected, output in zip(results, n.outputs):
            collected.append(c.read(output))
    c.write_all(n.outputs, [mx.stack(collected, n.scan_axis) for collected in results])
