"""Shape nodes: the cases of irprograms/node_cases, and invalid shapes."""

import pytest
import torch
from irprograms import Graph, ir, lit, lits
from irprograms.node_case import check, parametrize, random
from irprograms.node_cases import shape

X = random(2, 3, 4)


@parametrize(shape.CASES)
def test_node_matches_torch(case, dtype):
    check(case, dtype)


def test_noop_does_nothing():
    g = Graph()
    g.emit(ir.NoopNode(), ir.IdCopyNode(x=g.input((2,)), out=g.output((2,))))
    assert torch.equal(g.run(torch.ones(2))[0], torch.ones(2))


@pytest.mark.parametrize(
    "node, fields, message",
    [
        (ir.ReshapeNode, {"shape": lits(5, -1)}, "shape: got [5,-1], expected 24 elements"),
        (ir.ReshapeNode, {"shape": lits(0, -1)}, "shape: got [0,-1], expected 24 elements"),
        (ir.ReshapeNode, {"shape": lits(2**40)}, "does not fit in 32 bits"),
        (ir.TransposeNode, {"perm": [0, 1, 1]}, "axis 1 is listed twice"),
        (ir.TransposeNode, {"perm": [0, 1]}, "perm: got 2 axes, expected 3"),
        (ir.TileNode, {"reps": lits(2**30, 2**30, 1)}, "does not fit in 32 bits"),
        (ir.TileNode, {"reps": lits(2**20, 2**10, 4)}, "expected fewer than 2^31 elements"),
        (ir.RepeatNode, {"repeats": lit(-1), "axis": 0}, "repeats: got -1, expected 0 or more"),
        (ir.BroadcastToNode, {"shape": lits(3, 4)}, "shape: got [3,4], expected at least 3 axes"),
        (ir.AsStridedNode, {"shape": lits(2), "strides": lits(24), "offset": 0}, "exceed the 24 elements of x"),
        (ir.AsStridedNode, {"shape": lits(3), "strides": lits(-1), "offset": 1}, "exceed the 24 elements of x"),
        (ir.PadNode, {"pad_width": lits(1, 1), "mode": "edge"}, "pad_width: got 2 values, expected 6"),
        (ir.PadNode, {"pad_width": lits(*[1] * 6), "mode": "wrap"}, 'mode: got "wrap"'),
        (ir.ReshapeNode, {"shape": lits(2, 3, 4, *[1] * 14)}, "result: got 17 axes, expected at most 16"),
    ],
)
def test_invalid_shapes_are_errors(node, fields, message, capfd):
    g = Graph()
    g.emit(node(x=g.input((2, 3, 4)), out=g.output((1,)), **fields))
    with pytest.raises(RuntimeError):
        g.run(X)
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_padding_that_an_integer_cannot_hold_is_refused(value, capfd):
    g = Graph()
    x, out = g.input((2,), torch.uint8), g.output((4,), torch.uint8)
    g.emit(ir.PadNode(x=x, out=out, pad_width=lits(1, 1), mode="constant", constant_value=value))
    with pytest.raises(RuntimeError):
        g.run(torch.ones(2, dtype=torch.uint8))
    assert "does not fit in 64 bits" in capfd.readouterr().err


def test_sizes_whose_sum_overflows_are_refused(capfd):
    g = Graph()
    x, wide = g.input((1, 1)), g.new_temp()
    g.emit(
        ir.BroadcastToNode(x=x, out=wide, shape=lits(1, 2**30)),
        ir.ConcatenateNode(tensors=[wide] * 3, out=g.output((1,)), axis=1),
    )
    with pytest.raises(RuntimeError):
        g.run(torch.ones(1, 1))
    assert "result size 3221225472 does not fit in 32 bits" in capfd.readouterr().err
