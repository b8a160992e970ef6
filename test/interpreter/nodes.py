"""What each IR node does in ExecuTorch's own MLX delegate: a table with a line for each node.

A function of the table takes the node and the call, and returns the result, which goes to the slot `out`, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
from executorch_mlx.serialization import ir

from . import node_functions as f
from .arrays import HALF
from .call import Call, Widened
from .meaning import Refused

# -- families ---------------------------------------------------------------------------


def unary(function: Callable) -> Callable:
    return lambda n, c: function(c.read(n.x))


def binary(function: Callable) -> Callable:
    return lambda n, c: function(c.read(n.a), c.read(n.b))


def of_integers(function: Callable) -> Callable:
    return lambda n, c: function(c.int(n.a), c.int(n.b))


def reduction(function: Callable) -> Callable:
    """Without axes, all axes are reduced."""
    return lambda n, c: function(c.read(n.x), n.axes or None, n.keepdims)


def variance(function: Callable) -> Callable:
    return lambda n, c: function(c.read(n.x), n.axes or None, n.keepdims, n.ddof)


def index_of(function: Callable) -> Callable:
    return lambda n, c: function(c.read(n.x), n.axis, n.keepdims)


def along(function: Callable) -> Callable:
    return lambda n, c: function(c.read(n.x), n.axis)


def partial_sort(function: Callable) -> Callable:
    return lambda n, c: function(c.read(n.x), c.int(n.kth), n.axis)


def joined(function: Callable) -> Callable:
    return lambda n, c: function([c.read(t) for t in n.tensors], n.axis)


def triangle(function: Callable) -> Callable:
    return lambda n, c: function(c.read(n.x), n.k)


def product(function: Callable, first: str) -> Callable:
    """Half precision is summed in float32, as MLX's GPU kernels do. The result has the dtype of the operand `first`."""

    def in_float32(n: ir.Op, c: Call) -> mx.array:
        x = c.read(getattr(n, first))
        return function(n, Widened(**vars(c))).astype(x.dtype) if x.dtype in HALF else function(n, c)

    return in_float32


def convolution(function: Callable, axes: Sequence[str], *names: str) -> Callable:
    """The fields `stride_h` and `stride_w` of a node make the argument `stride`, for the `axes` h and w."""

    def field(n, name: str):
        return tuple(getattr(n, f"{name}_{axis}") for axis in axes) or getattr(n, name)

    return lambda n, c: function(c.read(n.x), c.read(n.w), *(field(n, name) for name in names), n.groups)


PLAIN, TRANSPOSED = ("stride", "padding", "dilation"), ("stride", "padding", "dilation", "output_padding")


def refused(reason: str) -> Callable:
    def refuse(n: ir.Op, c: Call):
        raise Refused(reason)

    return refuse


NODES: dict[type[ir.Op], Callable] = {
    ir.NoopNode: lambda n, c: None,
    ir.IdCopyNode: unary(lambda x: x),
    ir.AddmmNode: product(f.addmm, "mat1"),
    ir.ItemIntNode: f.item,
    ir.ExpandDimsNode: along(mx.expand_dims),
    ir.TileNode: lambda n, c: mx.tile(c.read(n.x), c.ints(n.reps)),
    ir.TakeAlongAxisNode: f.take_along_axis,
    ir.TakeNode: f.take,
    ir.RMSNormNode: lambda n, c: mx.fast.rms_norm(c.read(n.x), c.optional(n.weight), n.eps),
    ir.LayerNormNode: lambda n, c: mx.fast.layer_norm(c.read(n.x), c.optional(n.weight), c.optional(n.bias), n.eps),
    ir.RopeNode: f.rope,
    ir.SdpaNode: product(f.sdpa, "q"),
    ir.AddNode: binary(mx.add),
    ir.AddIntNode: of_integers(lambda a, b: a + b),
    ir.SubtractIntNode: of_integers(lambda a, b: a - b),
    ir.MultiplyIntNode: of_integers(lambda a, b: a * b),
    ir.FloorDivideIntNode: of_integers(f.divided),
    ir.SymSizeNode: f.size,
    ir.MultiplyNode: binary(mx.multiply),
    ir.DivideNode: binary(mx.divide),
    ir.SubtractNode: binary(mx.subtract),
    ir.Conv1DNode: convolution(mx.conv1d, "", *PLAIN),
    ir.Conv2DNode: convolution(mx.conv2d, "hw", *PLAIN),
    ir.Conv3DNode: convolution(mx.conv3d, "dhw", *PLAIN),
    ir.GeluNode: f.gelu,
    ir.ARangeNode: f.arange,
    ir.SiluNode: unary(lambda x: x * mx.sigmoid(x)),
    ir.SigmoidNode: unary(mx.sigmoid),
    ir.TanhNode: unary(mx.tanh),
    ir.SqueezeNode: f.squeeze,
    ir.SplitNode: f.split,
    ir.RsqrtNode: unary(mx.rsqrt),
    ir.MaximumNode: binary(mx.maximum),
    ir.MinimumNode: binary(mx.minimum),
    ir.LogNode: unary(mx.log),
    ir.SoftmaxNode: lambda n, c: mx.softmax(c.read(n.x), n.axis, precise=n.precise),
    ir.BroadcastToNode: f.broadcast_to,
    ir.PadNode: f.pad,
    ir.WhereNode: lambda n, c: mx.where(c.read(n.condition), c.read(n.x), c.read(n.y)),
    ir.ReshapeNode: lambda n, c: mx.reshape(c.read(n.x), c.ints(n.shape)),
    ir.TransposeNode: lambda n, c: mx.transpose(c.read(n.x), n.perm),
    ir.AsStridedNode: f.as_strided,
    ir.ContiguousNode: unary(mx.contiguous),
    ir.GatherNode: f.gather,
    ir.SliceNode: f.slice_,
    ir.AsTypeNode: lambda n, c: c.read(n.x).astype(c.meaning.dtype(n.scalar_type)),
    ir.ConcatenateNode: joined(mx.concatenate),
    ir.FullNode: f.full,
    ir.FullLikeNode: f.full_like,
    ir.ArgmaxNode: index_of(mx.argmax),
    ir.SliceUpdateNode: f.slice_update,
    ir.IndexCopyNode: f.index_copy,
    ir.DequantizeNode: f.dequantize,
    ir.LessNode: binary(mx.less),
    ir.LessEqualNode: binary(mx.less_equal),
    ir.GreaterNode: binary(mx.greater),
    ir.GreaterEqualNode: binary(mx.greater_equal),
    ir.EqualNode: binary(mx.equal),
    ir.NotEqualNode: binary(mx.not_equal),
    ir.LogicalNotNode: unary(mx.logical_not),
    ir.LogicalAndNode: binary(mx.logical_and),
    ir.LogicalOrNode: binary(mx.logical_or),
    ir.TriNode: f.tri,
    ir.TrilNode: triangle(mx.tril),
    ir.TriuNode: triangle(mx.triu),
    ir.FloorNode: unary(mx.floor),
    ir.CeilNode: unary(mx.ceil),
    ir.SquareNode: unary(mx.square),
    ir.ExpNode: unary(mx.exp),
    ir.SinNode: unary(mx.sin),
    ir.CosNode: unary(mx.cos),
    ir.TanNode: unary(mx.tan),
    ir.ArcsinNode: unary(mx.arcsin),
    ir.ArccosNode: unary(mx.arccos),
    ir.ArctanNode: unary(mx.arctan),
    ir.SinhNode: unary(mx.sinh),
    ir.CoshNode: unary(mx.cosh),
    ir.ArcsinhNode: unary(mx.arcsinh),
    ir.ArccoshNode: unary(mx.arccosh),
    ir.ArctanhNode: unary(mx.arctanh),
    ir.Log2Node: unary(mx.log2),
    ir.Log10Node: unary(mx.log10),
    ir.Log1pNode: unary(mx.log1p),
    ir.ErfNode: unary(mx.erf),
    ir.Expm1Node: unary(mx.expm1),
    ir.RoundNode: lambda n, c: mx.round(c.read(n.x), n.decimals),
    ir.ReciprocalNode: unary(mx.reciprocal),
    ir.SqrtNode: unary(mx.sqrt),
    ir.AbsNode: unary(mx.abs),
    ir.NegNode: unary(mx.negative),
    ir.Atan2Node: binary(mx.arctan2),
    ir.LogAddExpNode: binary(mx.logaddexp),
    ir.FloorDivideNode: binary(f.floor_divide),
    ir.PowerNode: binary(f.power),
    ir.LogSumExpNode: lambda n, c: mx.logsumexp(c.read(n.x), n.axes or [], n.keepdims),
    ir.SumNode: reduction(mx.sum),
    ir.MeanNode: reduction(mx.mean),
    ir.VarNode: variance(mx.var),
    ir.StdNode: variance(mx.std),
    ir.ProdNode: reduction(mx.prod),
    ir.MaxNode: reduction(mx.max),
    ir.MinNode: reduction(mx.min),
    ir.ArgminNode: index_of(mx.argmin),
    ir.MedianNode: reduction(mx.median),
    ir.ModIntNode: of_integers(f.modulo),
    ir.RemainderNode: binary(f.remainder),
    ir.ConvTranspose1DNode: convolution(mx.conv_transpose1d, "", *TRANSPOSED),
    ir.ConvTranspose2DNode: convolution(mx.conv_transpose2d, "hw", *TRANSPOSED),
    ir.ConvTranspose3DNode: convolution(mx.conv_transpose3d, "dhw", *TRANSPOSED),
    ir.ClipNode: lambda n, c: mx.clip(c.read(n.x), c.optional(n.a_min), c.optional(n.a_max)),
    ir.CumsumNode: lambda n, c: mx.cumsum(c.read(n.x), n.axis, reverse=n.reverse, inclusive=n.inclusive),
    ir.StackNode: joined(mx.stack),
    ir.SignNode: unary(mx.sign),
    ir.AnyNode: reduction(mx.any),
    ir.AllNode: reduction(mx.all),
    ir.RepeatNode: f.repeat,
    ir.SortNode: along(mx.sort),
    ir.ArgsortNode: along(mx.argsort),
    ir.PartitionNode: partial_sort(mx.partition),
    ir.ArgPartitionNode: partial_sort(mx.argpartition),
    ir.QuantizedMatmulNode: product(f.quantized_matmul, "x"),
    ir.ScatterAddNode: f.scatter_add,
    ir.GatherMmNode: product(f.gather_mm, "a"),
    ir.GatherQmmNode: product(f.gather_qmm, "x"),
    ir.ScanNode: f.scan,
    ir.MetalKernelNode: refused("kernels in programs are disabled"),
    ir.BitwiseInvertNode: unary(mx.bitwise_invert),
    ir.RollNode: lambda n, c: mx.roll(c.read(n.x), tuple(c.ints(n.shift)), tuple(n.axes)),
    ir.BitwiseAndNode: binary(mx.bitwise_and),
    ir.BitwiseOrNode: binary(mx.bitwise_or),
    ir.BitwiseXorNode: binary(mx.bitwise_xor),
    ir.IfNode: f.if_else,
    ir.RandomBitsNode: f.random_bits,
    ir.UpdateAndAttendNode: refused("the host has installed no cache"),
    ir.TruncNode: unary(mx.trunc),
    ir.FlipNode: f.flip,
}
