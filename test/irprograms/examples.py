"""Programs with about 50 kinds of IR nodes, for tests that damage a program's bytes or run a program many times.

Each function returns a graph and the arguments of a call.
"""

import torch
from executorch_mlx.serialization import ir

from .graph import FLOAT32, INT32, Graph, lit, lits, number, value_of


def decoder():
    """A small decoder layer: embedding, norm, RoPE, KV cache, attention and sampling."""
    g = Graph()
    token, pos = g.input((1,), torch.int32), g.input((1,), torch.int32)
    temperature = g.input((1,))
    w = {n: g.constant(torch.randn(8, 8)) for n in "qkvo"}
    table, weight = g.constant(torch.randn(16, 8)), g.constant(torch.ones(8))
    keys, values = g.buffer((1, 2, 12, 4)), g.buffer((1, 2, 12, 4))
    x, h, p = g.new_temp(), g.new_temp(), g.item(pos)
    end = g.new_value()
    g.emit(
        ir.TakeNode(x=table, index=ir.IntOrVidOrTid(kind=2, tid=token), out=x, axis=0),
        ir.RMSNormNode(x=x, weight=weight, out=h, eps=1e-5),
        ir.AddIntNode(a=value_of(p), b=lit(1), out=end),
    )
    heads = {}
    for name in "qkv":
        y = heads[name] = g.new_temp()
        g.emit(
            ir.AddmmNode(mat1=h, mat2=w[name], out=y),
            ir.ReshapeNode(x=y, out=y, shape=lits(1, 1, 2, 4)),
            ir.TransposeNode(x=y, out=y, perm=[0, 2, 1, 3]),
        )
        if name != "v":
            at = ir.VidOrTid(vid=p, is_vid=True)
            g.emit(ir.RopeNode(x=y, out=y, dims=4, offset=at))
    history = {}
    for name, buffer in (("k", keys), ("v", values)):
        history[name] = g.new_temp()
        g.emit(
            ir.SliceUpdateNode(
                dst=buffer, update=heads[name], out=buffer, axis=lit(2), start=value_of(p), stop=value_of(end)
            ),
            ir.SliceNode(x=buffer, out=history[name], axis=lit(2), start=lit(0), stop=value_of(end)),
        )
    y, logits = g.new_temp(), g.output((1, 16))
    g.emit(
        ir.SdpaNode(q=heads["q"], k=history["k"], v=history["v"], out=y, scale=0.5),
        ir.TransposeNode(x=y, out=y, perm=[0, 2, 1, 3]),
        ir.ReshapeNode(x=y, out=y, shape=lits(1, 8)),
        ir.AddmmNode(mat1=y, mat2=w["o"], out=y, bias=x),
        ir.SiluNode(x=y, out=y),
        ir.TransposeNode(x=table, out=h, perm=[1, 0]),
        ir.AddmmNode(mat1=y, mat2=h, out=logits),
    )
    chosen, is_greedy, zero, bits = g.output((1,), torch.int32), g.new_temp(), g.new_temp(), g.new_temp()
    g.emit(
        ir.FullLikeNode(x=temperature, out=zero, v=number(0.0)), ir.LessEqualNode(a=temperature, b=zero, out=is_greedy)
    )
    greedy = g.chain(ir.ArgmaxNode(x=logits, out=chosen, axis=-1))
    sample = g.chain(
        ir.RandomBitsNode(out=bits, shape=lits(1, 16), seed=p),
        ir.AsTypeNode(x=bits, out=bits, scalar_type=FLOAT32),
        ir.LogNode(x=bits, out=bits),
        ir.AddNode(a=logits, b=bits, out=bits),
        ir.ArgmaxNode(x=bits, out=chosen, axis=-1),
    )
    g.emit(
        ir.IfNode(cond=value_of(g.item(is_greedy)), then_chain_idx=greedy, else_chain_idx=sample),
        ir.AsTypeNode(x=chosen, out=chosen, scalar_type=INT32),
    )
    i32 = torch.int32
    return g, [torch.tensor([3], dtype=i32), torch.tensor([2], dtype=i32), torch.tensor([0.7])]


def shapes():
    """A sequence of nodes that take sizes, axes or indices."""
    g = Graph()
    x, i = g.input((4, 6)), g.input((4, 6), torch.int32)
    t = [g.new_temp() for _ in range(8)]
    step, out = g.new_temp(), g.output((4, 6))
    g.emit(
        ir.PadNode(x=x, out=t[0], pad_width=lits(1, 0, 0, 2), mode="constant"),
        ir.SliceNode(x=t[0], out=t[0], axis=lit(0), start=lit(1), stop=lit(5)),
        ir.SplitNode(x=t[0], outs=[t[1], t[2]], sizes=lits(6, 2), axis=1),
        ir.TakeAlongAxisNode(x=t[1], indices=i, out=t[1], axis=1),
        ir.ScatterAddNode(x=t[1], indices=i, updates=x, out=t[1], axis=1),
        ir.SortNode(x=t[1], out=t[1], axis=-1),
        ir.PartitionNode(x=t[1], out=t[1], kth=lit(2), axis=0),
        ir.CumsumNode(x=t[1], out=t[1], axis=0),
        ir.TileNode(x=t[1], out=t[3], reps=lits(2, 3)),
        ir.AsStridedNode(x=t[3], out=t[3], shape=lits(4, 6), strides=lits(6, 1), offset=3),
        ir.RollNode(x=t[3], out=t[3], shift=lits(2), axes=[1]),
        ir.FlipNode(x=t[3], out=t[3], axes=[0]),
        ir.ARangeNode(out=t[4], start=lit(0), stop=lit(6), step=lit(1), scalar_type=INT32),
        ir.FullNode(out=t[5], shape=lits(4, 6), v=number(2.0), scalar_type=INT32),
        ir.FloorDivideNode(a=t[4], b=t[5], out=t[5]),
        ir.PowerNode(a=t[5], b=i, out=t[5]),
        ir.AsTypeNode(x=t[5], out=t[5], scalar_type=FLOAT32),
        ir.BroadcastToNode(x=t[5], out=t[5], shape=lits(4, 6)),
        ir.GatherNode(x=t[3], indices=[t[4]], out=t[6], axes=[1], slice_sizes=[4, 1]),
        ir.RepeatNode(x=t[6], out=t[6], repeats=lit(2), axis=0),
        ir.MeanNode(x=t[6], out=t[6], axes=[0, 2], keepdims=False),
        ir.IndexCopyNode(dst=t[3], update=t[3], indices=t[4], out=t[3], axis=1),
        ir.TriNode(out=t[7], n=lit(4), m=lit(6), scalar_type=FLOAT32),
        ir.ConcatenateNode(tensors=[t[3], t[7]], out=t[7], axis=0),
        ir.VarNode(x=t[7], out=t[7], axes=[0], ddof=1),
    )
    body = g.chain(ir.AddNode(a=step, b=step, out=step))
    g.emit(
        ir.ScanNode(originals=[t[3]], sliced=[step], outputs=[step], carry=[], body_chain_idx=body),
        ir.AddNode(a=step, b=t[5], out=t[0]),
        ir.AddNode(a=t[0], b=t[7], out=out),
    )
    return g, [torch.randn(4, 6), torch.randint(0, 6, (4, 6), dtype=torch.int32)]


def layers():
    """Convolutions, norms and quantized weights."""
    import mlx.core as mx
    import numpy as np

    g = Graph()
    x, q = g.input((1, 6, 6, 4)), g.input((2, 64))
    w = g.constant(torch.randn(4, 3, 3, 4))
    packed = [
        torch.from_numpy(np.array(p)) for p in mx.quantize(mx.random.normal((8, 64), key=mx.random.key(0)), 32, 4)
    ]
    parts = dict(zip(("w", "scales", "biases"), map(g.constant, packed)))
    t, y = g.new_temp(), g.new_temp()
    g.emit(
        ir.Conv2DNode(x=x, w=w, out=t, padding_h=1, padding_w=1),
        ir.ConvTranspose2DNode(x=t, w=w, out=t, stride_h=2, stride_w=2),
        ir.LayerNormNode(x=t, out=t, eps=1e-5),
        ir.GeluNode(x=t, out=t, approximate="tanh"),
        ir.MaxNode(x=t, out=g.output((1, 4)), axes=[1, 2]),
        ir.QuantizedMatmulNode(x=q, out=y, group_size=32, bits=4, mode="affine", **parts),
        ir.SoftmaxNode(x=y, out=g.output((2, 8)), axis=-1),
        ir.DequantizeNode(out=y, group_size=32, bits=4, mode="affine", **parts),
        ir.MedianNode(x=y, out=g.output((8,)), axes=[1]),
    )
    return g, [torch.randn(1, 6, 6, 4), torch.randn(2, 64)]


EXAMPLES = {"decoder": decoder, "shapes": shapes, "layers": layers}
