"""Rules that compute the types of the results of an IR node, as mlx::core does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .listing import unwrap_operand
from .types import Env, Shape, Type, Unknown, at_least_float, broadcast, dtype_name, promote

Rule = Callable[[Any, Env], Any]  # takes an instruction and returns a Type, or a list of them
"""`rule(n, env)` returns the Type of the result of IR node `n`, or a list of Types if `n` has several results. `env`
has the types and numbers of the operands. The rule raises Unknown if it needs a shape that is unknown."""


def _with_extent(shape: Shape, axis: int, extent: int | None) -> Shape:
    if not -len(shape) <= axis < len(shape):
        raise Unknown
    dims = list(shape)
    dims[axis] = extent
    return tuple(dims)


def _product(*dims: int | None) -> int | None:
    return None if None in dims else math.prod(dims)


def _sum(dims: list[int | None]) -> int | None:
    return None if None in dims else sum(dims)


def _dims(list_, env: Env) -> Shape:
    return tuple(env.value(x) for x in list_)


# -- elementwise ---------------------------------------------------------------


def same_as(field: str) -> Rule:
    """Return a rule: the result has the type of the operand in the field `field`."""
    return lambda n, env: Type(env.shape(getattr(n, field)), env.dtype(getattr(n, field)))


def floating(n, env):
    """The rule for a function that computes in floating point: integers become float32. The shape is that of `x`."""
    return Type(env.shape(n.x), at_least_float(env.dtype(n.x)))


def with_dtype(dtype: str) -> Rule:
    """Return a rule: the result has the shape of `x` and the dtype `dtype`."""
    return lambda n, env: Type(env.shape(n.x), dtype)


def as_type(n, env):
    return Type(env.shape(n.x), dtype_name(n.scalar_type))


def binary(n, env):
    return Type(broadcast(env.shape(n.a), env.shape(n.b)), promote(env.dtype(n.a), env.dtype(n.b)))


def binary_floating(n, env):
    shape, dtype = binary(n, env)
    return Type(shape, at_least_float(dtype))


def comparison(n, env):
    return Type(broadcast(env.shape(n.a), env.shape(n.b)), "bool")


def where(n, env):
    shape = broadcast(*(env.shape(s) for s in (n.condition, n.x, n.y)))
    return Type(shape, promote(env.dtype(n.x), env.dtype(n.y)))


def clip(n, env):
    tensors = [n.x, *(s for s in (n.a_min, n.a_max) if s is not None)]
    return Type(broadcast(*map(env.shape, tensors)), promote(*map(env.dtype, tensors)))


# -- reductions ----------------------------------------------------------------


def _reduced_shape(n, env) -> Shape:
    shape = env.shape(n.x)
    axes = {a % len(shape) for a in n.axes} if n.axes else set(range(len(shape)))
    return tuple(1 if i in axes else d for i, d in enumerate(shape) if n.keepdims or i not in axes)


def reduction(result_dtype: Callable[[str | None], str | None]) -> Rule:
    """Return the rule for a reduction. `result_dtype` maps the dtype of `x` to the dtype of the result."""
    return lambda n, env: Type(_reduced_shape(n, env), result_dtype(env.dtype(n.x)))


def summed_dtype(dtype: str | None) -> str | None:
    """Return the dtype of a sum or product: MLX computes sums and products of narrow integers in 32 bits."""
    return {"bool": "int32", "int8": "int32", "int16": "int32", "uint8": "uint32", "uint16": "uint32"}.get(dtype, dtype)


def arg_reduction(n, env):
    shape = env.shape(n.x)
    if not shape:
        return Type((), "uint32")
    reduced = _with_extent(shape, n.axis, 1)
    axis = n.axis % len(shape)
    return Type(reduced if n.keepdims else reduced[:axis] + reduced[axis + 1 :], "uint32")


# -- shapes --------------------------------------------------------------------


def expand_dims(n, env):
    shape = env.shape(n.x)
    axis = n.axis % (len(shape) + 1)
    return Type((*shape[:axis], 1, *shape[axis:]), env.dtype(n.x))


def squeeze(n, env):
    shape = env.shape(n.x)
    axes = {d % len(shape) for d in n.dims} if n.dims else set(range(len(shape)))
    if not all(isinstance(shape[i], int) for i in axes):
        raise Unknown
    removed = {i for i in axes if shape[i] == 1}
    return Type(tuple(d for i, d in enumerate(shape) if i not in removed), env.dtype(n.x))


def reshape(n, env):
    shape, source = _dims(n.shape, env), env.shape(n.x)
    if shape.count(-1) == 1:
        rest, size = _product(*(d for d in shape if d != -1)), _product(*source)
        shape = tuple((size // rest if rest and size is not None else None) if d == -1 else d for d in shape)
    return Type(shape, env.dtype(n.x))


def broadcast_to(n, env):
    source = env.shape(n.x)
    shape = list(_dims(n.shape, env))
    for i, d in enumerate(reversed(shape), 1):
        if d == -1 and i <= len(source):
            shape[-i] = source[-i]
    return Type(tuple(shape), env.dtype(n.x))


def transpose(n, env):
    shape = env.shape(n.x)
    return Type(tuple(shape[p] for p in n.perm), env.dtype(n.x))


def as_strided(n, env):
    return Type(_dims(n.shape, env), env.dtype(n.x))


def tile(n, env):
    shape, reps = env.shape(n.x), _dims(n.reps, env)
    rank = max(len(shape), len(reps))
    shape, reps = (1,) * (rank - len(shape)) + shape, (1,) * (rank - len(reps)) + reps
    return Type(tuple(map(_product, shape, reps)), env.dtype(n.x))


def repeat(n, env):
    shape = env.shape(n.x)
    return Type(_with_extent(shape, n.axis, _product(shape[n.axis], env.value(n.repeats))), env.dtype(n.x))


def split(n, env):
    shape, sizes, parts = env.shape(n.x), list(_dims(n.sizes, env)), len(n.outs)
    if len(sizes) == 1 and parts > 1:  # all parts have this size, except the last, which has the remaining elements
        size, extent = sizes[0], shape[n.axis]
        rest = None if None in (size, extent) else extent - size * (parts - 1)
        sizes = [size] * (parts - 1) + [rest]
    return [Type(_with_extent(shape, n.axis, size), env.dtype(n.x)) for size in sizes]


def concatenate(n, env):
    shapes = [env.shape(x) for x in n.tensors]
    return Type(_with_extent(shapes[0], n.axis, _sum([s[n.axis] for s in shapes])), promote(*map(env.dtype, n.tensors)))


def stack(n, env):
    shape = env.shape(n.tensors[0])
    axis = n.axis % (len(shape) + 1)
    return Type((*shape[:axis], len(n.tensors), *shape[axis:]), promote(*map(env.dtype, n.tensors)))


def pad(n, env):
    widths = _dims(n.pad_width, env)
    dims = zip(env.shape(n.x), widths[::2], widths[1::2], strict=True)
    return Type(tuple(_sum(list(d)) for d in dims), env.dtype(n.x))


def slice_(n, env):
    shape, axis = env.shape(n.x), env.value(n.axis)
    if axis is None:
        raise Unknown
    length, start, stop = shape[axis], env.value(n.start), env.value(n.stop)
    extent = None
    if all(isinstance(v, int) for v in (length, start, stop)):
        extent = len(range(length)[start : stop : n.step])
    return Type(_with_extent(shape, axis, extent), env.dtype(n.x))


# -- indices -------------------------------------------------------------------


def all_gather(n, env):
    shape = env.shape(n.x)
    return Type(_with_extent(shape, n.axis, _product(shape[n.axis], n.size)), env.dtype(n.x))


def take(n, env):
    shape, index = env.shape(n.x), unwrap_operand(n.index)
    axis = n.axis % len(shape)
    indices = env.shape(index) if env.is_tensor(index) else ()
    return Type((*shape[:axis], *indices, *shape[axis + 1 :]), env.dtype(n.x))


def take_along_axis(n, env):
    return Type(env.shape(n.indices), env.dtype(n.x))


def gather(n, env):
    indices = broadcast(*map(env.shape, n.indices)) if n.indices else ()
    return Type((*indices, *n.slice_sizes), env.dtype(n.x))


# -- creation ------------------------------------------------------------------


def arange(n, env):
    bounds = [env.value(x) for x in (n.start, n.stop, n.step)]
    count = len(range(*bounds)) if all(isinstance(v, int) for v in bounds) and bounds[2] != 0 else None
    if bounds[0] == 0 and bounds[2] == 1:
        count = bounds[1] if count is None else count
    return Type((count,), "int32" if n.scalar_type is None else dtype_name(n.scalar_type))


def full(n, env):
    return Type(_dims(n.shape, env), dtype_name(n.scalar_type))


def full_like(n, env):
    return Type(env.shape(n.x), env.dtype(n.x) if n.scalar_type is None else dtype_name(n.scalar_type))


def tri(n, env):
    return Type(_dims((n.n, n.m), env), dtype_name(n.scalar_type))


def random_bits(n, env):
    return Type(_dims(n.shape, env), {1: "uint8", 2: "uint16", 4: "uint32"}.get(n.width))


def sample(n, env):
    shape = env.shape(n.logits)
    return Type(None if shape is None else shape[:1], "int64")


def mask_logits(n, env):
    return Type(env.shape(n.logits), "float32")


# -- products ------------------------------------------------------------------


def _matmul_shape(a: Shape, b: Shape) -> Shape:
    rows = a[-2:-1] if len(a) > 1 else ()
    columns = b[-1:] if len(b) > 1 else ()
    return broadcast(a[:-2], b[:-2]) + rows + columns if len(a) > 2 or len(b) > 2 else rows + columns


def addmm(n, env):
    return Type(_matmul_shape(env.shape(n.mat1), env.shape(n.mat2)), promote(env.dtype(n.mat1), env.dtype(n.mat2)))


def _batch_dims(n, env, a: Shape, b: Shape) -> Shape:
    left = env.shape(n.lhs_indices) if n.lhs_indices is not None else a[:-2]
    right = env.shape(n.rhs_indices) if n.rhs_indices is not None else b[:-2]
    return broadcast(left, right) if left or right else ()


def gather_mm(n, env):
    a, b = env.shape(n.a), env.shape(n.b)
    return Type((*_batch_dims(n, env, a, b), a[-2], b[-1]), env.dtype(n.a))


def _columns(n, env) -> int | None:
    """Return the number of columns of the unpacked matrix: a 32-bit word of `w` holds 32 / bits elements."""
    packed = env.shape(n.w)[-1]
    return None if packed is None or not n.bits else packed * 32 // n.bits


def dequantize(n, env):
    return Type(_with_extent(env.shape(n.w), -1, _columns(n, env)), _dequantized_dtype(n, env))


def _dequantized_dtype(n, env) -> str:
    """Return the dtype that the node names. If it names none, returns the dtype of the scales.

    The scales of the modes "mxfp4", "mxfp8" and "nvfp4" are bytes. These modes return bfloat16 by default.
    """
    if n.dtype is not None:
        return dtype_name(n.dtype)
    return env.dtype(n.scales) if n.mode == "affine" else "bfloat16"


def quantized_matmul(n, env):
    return Type((*env.shape(n.x)[:-1], env.shape(n.w)[-2] if n.transpose else _columns(n, env)), env.dtype(n.x))


def int8_quantized_matmul(n, env):
    return Type((*env.shape(n.x)[:-1], env.shape(n.w)[-2]), env.dtype(n.x))


def gather_qmm(n, env):
    x, w = env.shape(n.x), env.shape(n.w)
    columns = w[-2] if n.transpose else _columns(n, env)
    return Type((*_batch_dims(n, env, x, w), x[-2], columns), env.dtype(n.x))


def attention(n, env):
    return Type((*env.shape(n.q)[:-1], env.shape(n.v)[-1]), env.dtype(n.q))


def attention_gradients(n, env):
    return [Type(env.shape(x), env.dtype(x)) for x in (n.q, n.k, n.v)]


def cross_entropy(n, env):
    return Type(env.shape(n.targets), "float32")


def quantize_entries(n, env):
    shapes = [env.shape(x) for x in n.xs]
    if any(shape[-1] is None for shape in shapes) or not n.group_size:
        raise Unknown
    groups = sum(-(-shape[-1] // n.group_size) for shape in shapes)
    entries = _with_extent(shapes[0], -1, groups * n.group_size * n.bits // 8)
    scales = _with_extent(shapes[0], -1, 2 * groups)
    return [Type(entries, "uint8"), Type(scales, dtype_name(n.scale_type))]


def gated_recurrence(n, env):
    return [Type(env.shape(n.value), "float32"), Type(env.shape(n.state), "float32")]


def selective_scan(n, env):
    return [Type(env.shape(n.x), "float32"), Type(env.shape(n.state), "float32")]


def read_layer_state(n, env):
    return Type((env.shape(n.start)[0], env.shape(n.states)[-1]), env.dtype(n.states))


def quantized_sdpa(n, env):
    return Type((*env.shape(n.q)[:-1], n.value_size), env.dtype(n.q))


def update_and_attend(n, env):
    return Type(attention(n, env).shape, env.dtype(n.q) if n.out_dtype is None else dtype_name(n.out_dtype))


def convolution(axes: str, transposed: bool = False) -> Rule:
    """Return the rule for a convolution of x [N, *axes, C] with w [O, *axes, I].

    `axes` names the axes of the convolution by one letter each, which ends the names of their fields: "hw" for the
    fields `stride_h` and `stride_w`. A convolution over one axis has fields without such a letter: `axes` is empty.
    """

    suffixes = [f"_{a}" for a in axes] or [""]

    def rule(n, env):
        x, w = env.shape(n.x), env.shape(n.w)
        extents = []
        for i, suffix in enumerate(suffixes):
            stride, padding, dilation = (getattr(n, f + suffix) for f in ("stride", "padding", "dilation"))
            # The reach is the distance between the first and the last element under the kernel.
            size, reach = x[1 + i], None if w[1 + i] is None else dilation * (w[1 + i] - 1)
            if size is None or reach is None:
                extents.append(None)
            elif transposed:
                extra = getattr(n, "output_padding" + suffix)
                extents.append((size - 1) * stride - 2 * padding + reach + 1 + extra)
            else:
                extents.append((size + 2 * padding - reach - 1) // stride + 1)
        return Type((x[0], *extents, w[0]), env.dtype(n.x))

    return rule
