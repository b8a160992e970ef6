import pytest
import torch
from harness import Graph, ir, lit, lits
from rows import FLOATS, Row, cases, check, random

X = random(2, 3, 4)
F32 = FLOATS[:1]


def row(node, want, x=X, note="", **fields):
    return Row(node, {"x": x}, lambda x: want(x), fields, note=note, dtypes=FLOATS[:1] + FLOATS[2:])


def edge_pad(x):
    return torch.nn.functional.pad(x.float(), (2, 1, 1, 0), mode="replicate").to(x.dtype)


ROWS = [
    row(ir.IdCopyNode, lambda x: x),
    row(ir.ContiguousNode, lambda x: x),
    row(ir.ExpandDimsNode, lambda x: x.unsqueeze(1), axis=1),
    row(ir.ExpandDimsNode, lambda x: x.unsqueeze(-1), axis=-1, note="last"),
    row(ir.SqueezeNode, lambda x: x.squeeze((0, 2)), random(1, 3, 1), dims=[0, -1]),
    row(ir.SqueezeNode, lambda x: x.squeeze(), random(1, 3, 1), note="all"),
    row(ir.SqueezeNode, lambda x: x.squeeze((0, 1)), random(1, 3, 1), note="not 1", dims=[0, 1]),
    row(ir.SqueezeNode, lambda x: x.squeeze(1), random(1, 3, 1), note="none of 1", dims=[1]),
    row(ir.ReshapeNode, lambda x: x.reshape(6, 4), shape=lits(6, 4)),
    row(ir.ReshapeNode, lambda x: x.reshape(4, -1), shape=lits(4, -1), note="open"),
    row(ir.BroadcastToNode, lambda x: x.expand(5, 2, 3), random(2, 1), shape=lits(5, -1, 3)),
    row(ir.TransposeNode, lambda x: x.permute(2, 0, 1), perm=[2, 0, 1]),
    row(ir.TransposeNode, lambda x: x, torch.tensor(2.0), perm=[], note="0-d"),
    row(ir.FlipNode, lambda x: x.flip(0, -1), axes=[0, -1]),
    row(ir.TileNode, lambda x: x.tile(2, 1, 3), reps=lits(2, 1, 3)),
    row(ir.RepeatNode, lambda x: x.repeat_interleave(3, 1), repeats=lit(3), axis=1),
    row(ir.RollNode, lambda x: x.roll((1, -7), (0, 2)), shift=lits(1, -7), axes=[0, 2]),
    row(ir.RollNode, lambda x: x.roll(5), shift=lits(5), axes=[], note="flat"),
    row(ir.SplitNode, lambda x: x.split([1, 0, 3], 2), sizes=lits(1, 0, 3), axis=2),
    row(ir.SplitNode, lambda x: [x], sizes=lits(3), axis=1, note="whole"),
    row(ir.SplitNode, lambda x: x.split(2, 1), sizes=lits(2), axis=1, note="of one size"),
    row(
        ir.PadNode,
        lambda x: torch.nn.functional.pad(x, (2, 1, 0, 0, 1, 0), value=1.5),
        pad_width=lits(1, 0, 0, 0, 2, 1),
        mode="constant",
        constant_value=1.5,
    ),
    row(ir.PadNode, edge_pad, pad_width=lits(0, 0, 1, 0, 2, 1), mode="edge", note="edge"),
    row(
        ir.AsStridedNode,
        lambda x: x.as_strided((3, 2, 2), (4, 1, 2), 1),
        shape=lits(3, 2, 2),
        strides=lits(4, 1, 2),
        offset=1,
    ),
    Row(
        ir.ConcatenateNode,
        {"tensors": [random(2, 3), random(2, 1), random(2, 0)]},
        lambda tensors: torch.cat(tensors, 1),
        {"axis": -1},
    ),
    Row(
        ir.StackNode,
        {"tensors": [random(2, 3), random(2, 3)]},
        lambda tensors: torch.stack(tensors, -1),
        {"axis": -1},
    ),
]

COVERED = {ir.NoopNode}


@pytest.mark.parametrize("row, dtype", cases(ROWS))
def test_row(row, dtype):
    check(row, dtype)


def test_noop():
    g = Graph()
    g.emit(ir.NoopNode(), ir.IdCopyNode(x=g.input((2,)), out=g.output((2,))))
    assert torch.equal(g.run(torch.ones(2))[0], torch.ones(2))


@pytest.mark.parametrize(
    "node, fields, said",
    [
        (ir.ReshapeNode, {"shape": lits(5, -1)}, "does not fit shape [5,-1]"),
        (ir.ReshapeNode, {"shape": lits(0, -1)}, "does not fit shape [0,-1]"),
        (ir.ReshapeNode, {"shape": lits(2**40)}, "does not fit in 32 bits"),
        (ir.TransposeNode, {"perm": [0, 1, 1]}, "axis 1 comes twice"),
        (ir.TransposeNode, {"perm": [0, 1]}, "perm has 2 axes, x has 3"),
        (ir.TileNode, {"reps": lits(2**30, 2**30, 1)}, "does not fit in 32 bits"),
        (ir.TileNode, {"reps": lits(2**20, 2**10, 4)}, "more than 2^31 elements"),
        (ir.RepeatNode, {"repeats": lit(-1), "axis": 0}, "repeats -1 is negative"),
        (ir.BroadcastToNode, {"shape": lits(3, 4)}, "fewer axes than x"),
        (
            ir.AsStridedNode,
            {"shape": lits(2), "strides": lits(24), "offset": 0},
            "leave the 24 elements of x",
        ),
        (
            ir.AsStridedNode,
            {"shape": lits(3), "strides": lits(-1), "offset": 1},
            "leave the 24 elements of x",
        ),
        (ir.PadNode, {"pad_width": lits(1, 1), "mode": "edge"}, "2 widths came, 6 were expected"),
        (ir.PadNode, {"pad_width": lits(*[1] * 6), "mode": "wrap"}, 'mode is "wrap"'),
    ],
)
def test_wrong_shapes_are_errors(node, fields, said, capfd):
    g = Graph()
    g.emit(node(x=g.input((2, 3, 4)), out=g.output((1,)), **fields))
    with pytest.raises(RuntimeError):
        g.run(X)
    assert said in capfd.readouterr().err
