"""Nodes that take indices: the cases of irprograms/node_cases, index dtypes, and indices out of range."""

import pytest
import torch
from irprograms import Graph, ir, lit, lits
from irprograms.node_case import check, parametrize, random
from irprograms.node_cases import index
from irprograms.node_cases.index import take_index

X = random(4, 5, 6)
I32 = torch.int32


@parametrize(index.CASES)
def test_node_matches_torch(case, dtype):
    check(case, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8, torch.uint32])
def test_take_accepts_index_tensors(dtype):
    g = Graph()
    x, i = g.input((4, 300)), g.input((2, 2), dtype)
    g.emit(ir.TakeNode(x=x, index=take_index(tid=i), out=g.output((4, 2, 2)), axis=1))
    data, indices = random(4, 300), torch.tensor([[0, 3], [100, 7]])
    assert torch.equal(g.run(data, indices.to(dtype))[0], data[:, indices])


def computed_indices(g, dtype=I32):
    """Return the slot of an input plus 0: indices that are not on the host when the MLX graph is built."""
    i, t = g.input((3,), dtype), g.new_temp()
    g.emit(ir.AddNode(a=i, b=g.constant(torch.zeros(3, dtype=dtype)), out=t))
    return t


def test_index_copy_accepts_computed_indices():
    g = Graph()
    dst, update = g.input((4, 5)), g.input((4, 3))
    g.emit(ir.IndexCopyNode(dst=dst, update=update, indices=computed_indices(g), out=g.output((4, 5)), axis=1))
    x, y, i = random(4, 5), random(4, 3), torch.tensor([4, 0, 2])
    assert torch.equal(g.run(x, y, i.to(I32))[0], x.index_copy(1, i, y))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.int64])
def test_computed_indices_are_clamped(dtype):
    g = Graph()
    x = g.input((5,))
    g.emit(ir.TakeNode(x=x, index=take_index(tid=computed_indices(g, dtype)), out=g.output((3,)), axis=0))
    data = random(5)
    lowest = -100 if dtype.is_signed else 0
    (result,) = g.run(data, torch.tensor([100, lowest, 1]).to(dtype))
    assert torch.equal(result, data[torch.tensor([4, 0, 1])])


def take(x, index, out, axis=1):
    return ir.TakeNode(x=x, index=index, out=out, axis=axis)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x, i, out: take(x, take_index(tid=i), out), "index 9 is out of range [-5, 5)"),
        (lambda x, i, out: take(x, take_index(7), out), "index 7 is out of range [-5, 5)"),
        (lambda x, i, out: take(x, take_index(0), out, axis=3), "axis 3 is out of range [-3, 3)"),
        (
            lambda x, i, out: ir.GatherNode(x=x, indices=[i], out=out, axes=[1], slice_sizes=[4, 2, 6]),
            "index 9 is out of range [0, 4)",
        ),
        (
            lambda x, i, out: ir.GatherNode(x=x, indices=[i], out=out, axes=[1], slice_sizes=[4, 9, 6]),
            "slice size 9 on axis 1 is out of range [0, 5]",
        ),
        (
            lambda x, i, out: ir.IndexCopyNode(dst=x, update=x, indices=i, out=out, axis=1),
            "update: got shape [4,5,6], expected [4,2,6]",
        ),
        (
            lambda x, i, out: ir.SliceUpdateNode(dst=x, update=x, out=out, axis=lit(1), start=lit(3), stop=lit(8)),
            "update: got size 5, expected 2 for [3, 5) on axis 1",
        ),
    ],
)
def test_indices_out_of_range_are_errors(make, message, capfd):
    g = Graph()
    x, i, out = g.input((4, 5, 6)), g.input((2,), I32), g.output((1,))
    g.emit(make(x, i, out))
    with pytest.raises(RuntimeError):
        g.run(X, torch.tensor([0, 9], dtype=I32))
    assert message in capfd.readouterr().err


def test_reading_an_empty_slot_is_an_error(capfd):
    g = Graph()
    g.emit(ir.ReshapeNode(x=g.new_temp(), out=g.output((1,)), shape=lits(1)))
    with pytest.raises(RuntimeError):
        g.run()
    assert "tensor slot 1 is read before it is written" in capfd.readouterr().err
