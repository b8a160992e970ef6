"""ExecuTorch's own MLX delegate, and this project's runtime."""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
from executorch_mlx.serialization import ir

from . import node_functions as f
from . import nodes
from .arrays import HALF
from .call import Call
from .meaning import Meaning, Refused

UINT8, INT8, INT16, INT32, INT64, FLOAT16, FLOAT32, BOOL, BFLOAT16, UINT16, UINT32, UINT64 = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    11,
    15,
    27,
    28,
    29,
)
OFFICIAL_DTYPES = frozenset({UINT8, INT8, INT16, INT32, INT64, FLOAT16, FLOAT32, BOOL, BFLOAT16, UINT32})

OFFICIAL = Meaning(
    name="as ExecuTorch's own MLX delegate",
    nodes=nodes.NODES,
    number_bits=32,
    dtypes=OFFICIAL_DTYPES,
    empty=False,
    any_layout=False,
    shared_buffers=False,
    constant_destination=False,
)

# -- the nodes that this project's runtime takes in another way ----------------------------


def in_float32(function: Callable) -> Callable:
    """Compute half precision in float32, and cast the result back."""

    def g(x: mx.array, *arguments, **options) -> mx.array:
        wide = x.astype(mx.float32) if x.dtype in HALF else x
        y = function(wide, *arguments, **options)
        return y.astype(x.dtype) if x.dtype in HALF else y

    return g


def item(n: ir.ItemIntNode, c: Call) -> int:
    """The value of the element."""
    x = c.read(n.x)
    if x.size != 1:
        raise Refused(f"x: got {x.size} elements, expected 1")
    value = x.item()
    if not math.isfinite(value):
        raise Refused(f"x: got {value}, expected a number that fits in int64")
    return int(value)


def divide(function: Callable) -> Callable:
    """Of integers: 0 where b is 0, and no overflow where it is -1."""

    def g(a: mx.array, b: mx.array) -> mx.array:
        if not f.has_integers(a, b):
            return function(a, b)
        minus_one = b == mx.array(-1, b.dtype) if f.is_signed(b) else mx.array(False)
        by_one = mx.negative(a) if function is mx.floor_divide else mx.zeros_like(a)
        quotient = function(a, mx.where((b == 0) | minus_one, mx.array(1, b.dtype), b))
        result = mx.where(minus_one, by_one.astype(quotient.dtype), quotient)
        return mx.where(b == 0, mx.array(0, result.dtype), result)

    return g


def power(a: mx.array, b: mx.array) -> mx.array:
    """A negative power of an integer is 0, unless the base is 1 or -1."""
    if not f.has_integers(a, b) or not f.is_signed(b):
        return mx.power(a, b)
    result = mx.power(a, mx.abs(b))
    return mx.where((b < 0) & (mx.abs(a) != 1), mx.zeros_like(result), result)


def erf(x: mx.array) -> mx.array:
    return mx.where(x == 0, x.astype(mx.erf(x).dtype), mx.erf(x))


def of_any_shape(function: Callable, otherwise: Callable) -> Callable:
    """`otherwise` is for arrays without axes or elements, which MLX refuses."""

    def g(n: ir.Op, c: Call) -> mx.array:
        x = c.read(n.x)
        return function(n, c) if x.ndim and x.size else otherwise(x)

    return g


def index_of(function: Callable) -> Callable:
    def g(n: ir.ArgmaxNode, c: Call) -> mx.array:
        x = c.read(n.x)
        if x.ndim == 0:
            return mx.array(0, mx.uint32)
        if x.size == 0 and x.shape[n.axis]:
            return mx.sum(x, n.axis, n.keepdims).astype(mx.uint32)
        return function(x, n.axis, n.keepdims)

    return g


def logsumexp(n: ir.LogSumExpNode, c: Call) -> mx.array:
    x, axes = c.read(n.x), n.axes or None
    return mx.logsumexp(x, axes, n.keepdims) if x.size else mx.log(mx.sum(x, axes, n.keepdims))


def index_copy(n: ir.IndexCopyNode, c: Call) -> mx.array:
    dst = c.destination(n.dst)
    return f.copied_runs(dst, c.read(n.update), c.read(n.indices).tolist(), f.axis_of(n.axis, dst))


def scatter_add(n: ir.ScatterAddNode, c: Call) -> mx.array:
    """To the first elements of x on each other axis, as many as the indices have."""
    x, indices = c.read(n.x), c.read(n.indices)
    axis = f.axis_of(n.axis, x)
    corner = tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(indices.shape))
    updates = c.read(n.updates)[tuple(slice(size) for size in indices.shape)]
    if not indices.size:
        return x
    result = mx.array(x)
    result[corner] = f.scattered_sums(x[corner], indices, updates, axis)
    return result


def take(n: ir.TakeNode, c: Call) -> mx.array:
    x = c.read(n.x)
    if x.size:
        return f.take(n, c)
    axis = f.axis_of(n.axis, x)
    shape = c.read(n.index.tid).shape if n.index.kind == 2 else ()
    return mx.zeros([*x.shape[:axis], *shape, *x.shape[axis + 1 :]], x.dtype)


def addmm(n: ir.AddmmNode, c: Call) -> mx.array:
    y = n.alpha * mx.matmul(c.read(n.mat1), c.read(n.mat2))
    return y if n.bias is None else y + n.beta * c.read(n.bias)


def update_and_attend(n: ir.UpdateAndAttendNode, c: Call) -> mx.array:
    """The runtime owns the cache of each layer. What it holds from the position on is replaced."""
    q, position = c.read(n.q), int(c.read(n.position).reshape(-1)[0].item())
    key, new = ("cache", n.layer_id), (c.read(n.k), c.read(n.v))
    old = c.buffers.get(key)
    k, v = new if old is None else (mx.concatenate([a[:, :, :position], b], 2) for a, b in zip(old, new))
    c.buffers[key] = k, v
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=n.scale, mask="causal")


OURS_NODES = {
    ir.ItemIntNode: item,
    ir.AddmmNode: nodes.product(addmm, "mat1"),
    ir.UpdateAndAttendNode: nodes.product(update_and_attend, "q"),
    ir.GeluNode: nodes.product(f.gelu, "x"),
    ir.ErfNode: nodes.unary(erf),
    ir.FloorDivideNode: nodes.binary(divide(mx.floor_divide)),
    ir.RemainderNode: nodes.binary(divide(mx.remainder)),
    ir.PowerNode: nodes.binary(power),
    ir.SumNode: nodes.reduction(in_float32(mx.sum)),
    ir.MeanNode: nodes.reduction(in_float32(mx.mean)),
    ir.ProdNode: nodes.reduction(in_float32(mx.prod)),
    ir.VarNode: nodes.variance(in_float32(mx.var)),
    ir.StdNode: nodes.variance(in_float32(mx.std)),
    ir.LogSumExpNode: logsumexp,
    ir.ArgmaxNode: index_of(mx.argmax),
    ir.ArgminNode: index_of(mx.argmin),
    ir.SortNode: of_any_shape(nodes.NODES[ir.SortNode], lambda x: x),
    ir.ArgsortNode: of_any_shape(nodes.NODES[ir.ArgsortNode], lambda x: mx.zeros(x.shape, mx.uint32)),
    ir.SoftmaxNode: of_any_shape(nodes.NODES[ir.SoftmaxNode], mx.ones_like),
    ir.TakeNode: take,
    ir.IndexCopyNode: index_copy,
    ir.ScatterAddNode: scatter_add,
}

OURS = Meaning(
    name="as this project's runtime",
    nodes={**nodes.NODES, **OURS_NODES},
    number_bits=64,
    dtypes=OFFICIAL_DTYPES | {UINT16, UINT64},
    empty=True,
    any_layout=True,
    shared_buffers=True,
    constant_destination=True,
)
