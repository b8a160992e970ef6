"""Test cases of the elementwise nodes."""

import torch
from executorch_mlx.serialization import ir

from ..graph import SCALAR_TYPES
from ..node_case import FLOATS, NodeCase, random

X = random(3, 5)
UNIT = random(3, 5, low=-0.9, high=0.9)
POSITIVE = random(3, 5, low=0.1, high=4.0)
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 0.5, -2.5])
BITS = torch.tensor([[0, 1, -1, 37], [2**30, -5, 12, 255]], dtype=torch.int32)
MASK = torch.tensor([[True, False, True], [False, False, True]])


def unary(node, expected, x=X, **kwargs):
    return NodeCase(node, {"x": x}, lambda x: expected(x), **kwargs)


def binary(node, expected, a=X, b=None, **kwargs):
    b = random(5, low=0.5, high=3.0) if b is None else b
    return NodeCase(node, {"a": a, "b": b}, lambda a, b: expected(a, b), **kwargs)


UNARY = [
    unary(ir.AbsNode, torch.abs),
    unary(ir.ArccosNode, torch.arccos, UNIT),
    unary(ir.ArccoshNode, torch.arccosh, POSITIVE + 1),
    unary(ir.ArcsinNode, torch.arcsin, UNIT),
    unary(ir.ArcsinhNode, torch.arcsinh),
    unary(ir.ArctanNode, torch.arctan),
    unary(ir.ArctanhNode, torch.arctanh, UNIT),
    unary(ir.CeilNode, torch.ceil),
    unary(ir.CosNode, torch.cos),
    unary(ir.CoshNode, torch.cosh),
    unary(ir.ErfNode, torch.erf),
    unary(ir.ExpNode, torch.exp),
    unary(ir.Expm1Node, torch.expm1),
    unary(ir.FloorNode, torch.floor),
    unary(ir.LogNode, torch.log, POSITIVE),
    unary(ir.Log10Node, torch.log10, POSITIVE),
    unary(ir.Log1pNode, torch.log1p, POSITIVE),
    unary(ir.Log2Node, torch.log2, POSITIVE),
    unary(ir.NegNode, torch.neg),
    unary(ir.ReciprocalNode, torch.reciprocal, POSITIVE),
    unary(ir.RsqrtNode, torch.rsqrt, POSITIVE),
    unary(ir.SigmoidNode, torch.sigmoid),
    unary(ir.SignNode, torch.sign),
    unary(ir.SiluNode, torch.nn.functional.silu),
    unary(ir.SinNode, torch.sin),
    unary(ir.SinhNode, torch.sinh),
    unary(ir.SqrtNode, torch.sqrt, POSITIVE),
    unary(ir.SquareNode, torch.square),
    unary(ir.TanNode, torch.tan, UNIT),
    unary(ir.TanhNode, torch.tanh),
    unary(ir.TruncNode, torch.trunc),
    unary(ir.TruncNode, torch.trunc, EDGES, note="edges"),
    unary(ir.ExpNode, torch.exp, EDGES, note="edges"),
    unary(ir.LogNode, torch.log, EDGES, note="edges"),
    unary(ir.SigmoidNode, torch.sigmoid, EDGES, note="edges"),
    unary(ir.SqrtNode, torch.sqrt, EDGES, note="edges"),
    unary(ir.TruncNode, torch.trunc, BITS, dtypes=(torch.int32,)),
    unary(ir.NegNode, torch.neg, BITS, dtypes=(torch.int32,)),
    unary(ir.AbsNode, torch.abs, BITS, dtypes=(torch.int32,)),
    unary(ir.BitwiseInvertNode, torch.bitwise_not, BITS, dtypes=(torch.int32,)),
    unary(ir.LogicalNotNode, torch.logical_not, MASK, dtypes=(torch.bool,)),
    unary(ir.LogicalNotNode, torch.logical_not, BITS, dtypes=(torch.int32,)),
    unary(ir.ExpNode, torch.exp, torch.empty(0, 4), note="empty", dtypes=FLOATS[:1]),
    unary(ir.ExpNode, torch.exp, torch.tensor(1.5), note="0-d"),
]

COMPARISONS = [
    (ir.EqualNode, torch.eq),
    (ir.NotEqualNode, torch.ne),
    (ir.LessNode, torch.lt),
    (ir.LessEqualNode, torch.le),
    (ir.GreaterNode, torch.gt),
    (ir.GreaterEqualNode, torch.ge),
]

BINARY = [
    binary(ir.AddNode, torch.add),
    binary(ir.SubtractNode, torch.sub),
    binary(ir.MultiplyNode, torch.mul),
    binary(ir.DivideNode, torch.div),
    binary(ir.MaximumNode, torch.maximum),
    binary(ir.MinimumNode, torch.minimum),
    binary(ir.MaximumNode, torch.maximum, EDGES, torch.zeros(9), note="edges"),
    binary(ir.Atan2Node, torch.atan2),
    binary(ir.LogAddExpNode, torch.logaddexp),
    binary(ir.FloorDivideNode, torch.floor_divide),
    binary(ir.RemainderNode, torch.remainder),
    binary(ir.PowerNode, torch.pow, POSITIVE),
    binary(ir.AddNode, torch.add, BITS, BITS, dtypes=(torch.int32,)),
    binary(ir.MultiplyNode, torch.mul, BITS, BITS, dtypes=(torch.int32,)),
    binary(ir.BitwiseAndNode, torch.bitwise_and, BITS, BITS.flip(0), dtypes=(torch.int32,)),
    binary(ir.BitwiseOrNode, torch.bitwise_or, BITS, BITS.flip(0), dtypes=(torch.int32,)),
    binary(ir.BitwiseXorNode, torch.bitwise_xor, BITS, BITS.flip(0), dtypes=(torch.int32,)),
    binary(ir.LogicalAndNode, torch.logical_and, MASK, MASK.flip(0), dtypes=(torch.bool,)),
    binary(ir.LogicalOrNode, torch.logical_or, MASK, MASK.flip(0), dtypes=(torch.bool,)),
    *(binary(node, op, EDGES, EDGES.flip(0)) for node, op in COMPARISONS),
    *(binary(node, op, BITS, BITS.flip(0), dtypes=(torch.int32,)) for node, op in COMPARISONS),
]

DIVIDENDS = torch.tensor([7, -7, 0, -(2**31), 2**31 - 1], dtype=torch.int32)
DIVISORS = torch.tensor([2, -2, 5, -3, 1], dtype=torch.int32)
INTEGERS = [
    binary(ir.FloorDivideNode, torch.floor_divide, DIVIDENDS, DIVISORS, dtypes=(torch.int32,)),
    binary(ir.RemainderNode, torch.remainder, DIVIDENDS, DIVISORS, dtypes=(torch.int32,)),
    binary(
        ir.FloorDivideNode,
        lambda a, b: torch.tensor([-7, 7, 0, -(2**31), -(2**31) + 1], dtype=torch.int32),
        DIVIDENDS,
        torch.full((5,), -1, dtype=torch.int32),
        dtypes=(torch.int32,),
        note="by-minus-one",
    ),
    binary(
        ir.PowerNode,
        lambda a, b: torch.tensor([8, 0, 1, -1, 0], dtype=torch.int32),
        torch.tensor([2, 2, 1, -1, 3], dtype=torch.int32),
        torch.tensor([3, -1, -4, -3, -(2**31)], dtype=torch.int32),
        dtypes=(torch.int32,),
        note="negative-exponent",
    ),
]

OTHERS = [
    *(
        NodeCase(
            ir.GeluNode,
            {"x": random(4, 7, low=-4, high=4)},
            lambda x, approximate=approximate: torch.nn.functional.gelu(x.float(), approximate=approximate).to(x.dtype),
            {"approximate": approximate},
            note=approximate,
        )
        for approximate in ("none", "tanh")
    ),
    NodeCase(ir.RoundNode, {"x": torch.tensor([0.5, 1.5, -2.5, 2.4])}, torch.round),
    NodeCase(
        ir.RoundNode,
        {"x": torch.tensor([1.256, -7.123])},
        lambda x: torch.round(x, decimals=2),
        {"decimals": 2},
        dtypes=FLOATS[:1],
        note="decimals",
    ),
    NodeCase(
        ir.ClipNode,
        {"x": X, "a_min": torch.tensor(-1.0), "a_max": torch.tensor(0.5)},
        lambda x, a_min, a_max: torch.clip(x, a_min, a_max),
    ),
    NodeCase(ir.ClipNode, {"x": X, "a_min": torch.tensor(0.0)}, lambda x, a_min: x.clip(a_min), note="min"),
    NodeCase(
        ir.WhereNode,
        {"condition": MASK, "x": random(2, 3), "y": torch.tensor(1.0)},
        lambda condition, x, y: torch.where(condition, x, y),
    ),
    *(
        NodeCase(
            ir.AsTypeNode,
            {"x": torch.tensor([0.0, 1.0, 2.7, 200.0])},
            lambda x, to=to: x.to(to),
            {"scalar_type": SCALAR_TYPES[to]},
            note=str(to),
        )
        for to in (torch.int32, torch.bool, torch.uint8, torch.bfloat16)
    ),
]

CASES = UNARY + BINARY + INTEGERS + OTHERS
