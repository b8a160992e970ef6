"""Test cases of the nodes that rearrange, join and split arrays."""

import torch
from executorch_mlx.serialization import ir

from ..graph import lit, lits
from ..node_case import NodeCase, random

X = random(2, 3, 4)


def case(node, expected, x=X, note="", **fields):
    return NodeCase(node, {"x": x}, lambda x: expected(x), fields, note=note, dtypes=(torch.float32, torch.bfloat16))


def edge_pad(x):
    return torch.nn.functional.pad(x.float(), (2, 1, 1, 0), mode="replicate").to(x.dtype)


CASES = [
    case(ir.IdCopyNode, lambda x: x),
    case(ir.ContiguousNode, lambda x: x),
    case(ir.ExpandDimsNode, lambda x: x.unsqueeze(1), axis=1),
    case(ir.ExpandDimsNode, lambda x: x.unsqueeze(-1), axis=-1, note="last"),
    case(ir.SqueezeNode, lambda x: x.squeeze((0, 2)), random(1, 3, 1), dims=[0, -1]),
    case(ir.SqueezeNode, lambda x: x.squeeze(), random(1, 3, 1), note="all"),
    case(ir.SqueezeNode, lambda x: x.squeeze((0, 1)), random(1, 3, 1), note="also of size 3", dims=[0, 1]),
    case(ir.SqueezeNode, lambda x: x.squeeze(1), random(1, 3, 1), note="only of size 3", dims=[1]),
    case(ir.ReshapeNode, lambda x: x.reshape(6, 4), shape=lits(6, 4)),
    case(ir.ReshapeNode, lambda x: x.reshape(4, -1), shape=lits(4, -1), note="size -1"),
    case(ir.BroadcastToNode, lambda x: x.expand(5, 2, 3), random(2, 1), shape=lits(5, -1, 3)),
    case(ir.TransposeNode, lambda x: x.permute(2, 0, 1), perm=[2, 0, 1]),
    case(ir.TransposeNode, lambda x: x, torch.tensor(2.0), perm=[], note="0-d"),
    case(ir.FlipNode, lambda x: x.flip(0, -1), axes=[0, -1]),
    case(ir.TileNode, lambda x: x.tile(2, 1, 3), reps=lits(2, 1, 3)),
    case(ir.RepeatNode, lambda x: x.repeat_interleave(3, 1), repeats=lit(3), axis=1),
    case(ir.RollNode, lambda x: x.roll((1, -7), (0, 2)), shift=lits(1, -7), axes=[0, 2]),
    case(ir.RollNode, lambda x: x.roll(5), shift=lits(5), axes=[], note="flat"),
    case(ir.SplitNode, lambda x: x.split([1, 0, 3], 2), sizes=lits(1, 0, 3), axis=2),
    case(ir.SplitNode, lambda x: [x], sizes=lits(3), axis=1, note="whole"),
    case(ir.SplitNode, lambda x: x.split(2, 1), sizes=lits(2), axis=1, note="equal sizes"),
    case(
        ir.PadNode,
        lambda x: torch.nn.functional.pad(x, (2, 1, 0, 0, 1, 0), value=1.5),
        pad_width=lits(1, 0, 0, 0, 2, 1),
        mode="constant",
        constant_value=1.5,
    ),
    case(ir.PadNode, edge_pad, pad_width=lits(0, 0, 1, 0, 2, 1), mode="edge", note="edge"),
    case(
        ir.AsStridedNode,
        lambda x: x.as_strided((3, 2, 2), (4, 1, 2), 1),
        shape=lits(3, 2, 2),
        strides=lits(4, 1, 2),
        offset=1,
    ),
    NodeCase(
        ir.ConcatenateNode,
        {"tensors": [random(2, 3), random(2, 1), random(2, 0)]},
        lambda tensors: torch.cat(tensors, 1),
        {"axis": -1},
    ),
    NodeCase(
        ir.StackNode, {"tensors": [random(2, 3), random(2, 3)]}, lambda tensors: torch.stack(tensors, -1), {"axis": -1}
    ),
]
