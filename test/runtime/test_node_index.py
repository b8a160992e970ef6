import pytest
import torch
from harness import Graph, ir, lit, lits
from rows import Row, cases, check, random

X = random(4, 5, 6)
I32 = torch.int32


def at(literal=None, tid=None):
    if tid is not None:
        return ir.IntOrVidOrTid(kind=2, tid=tid)
    return ir.IntOrVidOrTid(literal=literal)


def slices(**fields):
    return {name: lit(x) if name != "step" else x for name, x in fields.items()}


def slice_update(dst, update):
    dst = dst.clone()
    dst[:, 1:4] = update
    return dst


ROWS = [
    Row(ir.SliceNode, {"x": X}, lambda x: x[:, 1:4], slices(axis=1, start=1, stop=4)),
    Row(ir.SliceNode, {"x": X}, lambda x: x[..., -4::2], slices(axis=-1, start=-4, stop=2**62, step=2), note="step"),
    Row(ir.SliceNode, {"x": X}, lambda x: x[3:1], slices(axis=0, start=3, stop=1), note="empty"),
    Row(ir.SliceNode, {"x": X}, lambda x: x.flip(1), slices(axis=1, start=-1, stop=-2**31, step=-1), note="reversed"),
    Row(ir.SliceNode, {"x": X}, lambda x: x[:, 1:5].flip(1)[:, ::2], slices(axis=1, start=4, stop=0, step=-2), note="backwards"),
    Row(ir.SliceNode, {"x": X}, lambda x: x[:, :0], slices(axis=1, start=1, stop=3, step=-1), note="backwards, empty"),
    Row(ir.SliceNode, {"x": X}, lambda x: x[:, 3:4], slices(axis=1, start=3, stop=0, step=-2**31), note="backwards, one"),
    Row(ir.SliceUpdateNode, {"dst": X, "update": random(4, 3, 6)}, slice_update, slices(axis=1, start=1, stop=4)),
    Row(ir.TakeNode, {"x": X}, lambda x: x[:, -2], {"axis": 1, "index": at(-2)}),
    Row(
        ir.TakeAlongAxisNode,
        {"x": X, "indices": torch.randint(0, 5, (4, 2, 6))},
        lambda x, indices: x.gather(1, indices),
        {"axis": 1},
    ),
    Row(
        ir.IndexCopyNode,
        {"dst": X, "update": random(4, 3, 6), "indices": torch.tensor([1, 2, 4])},
        lambda dst, update, indices: dst.index_copy(1, indices, update),
        {"axis": 1},
    ),
    Row(
        ir.ScatterAddNode,
        {"x": X, "indices": torch.randint(0, 5, (4, 7, 6)), "updates": random(4, 7, 6)},
        lambda x, indices, updates: x.scatter_add(1, indices, updates),
        {"axis": 1},
        tolerance=4,
    ),
    Row(
        ir.ScatterAddNode,
        {"x": X, "indices": torch.randint(0, 5, (2, 3, 1)), "updates": random(3, 4, 6)},
        lambda x, indices, updates: x.scatter_add(1, indices, updates),
        {"axis": 1},
        tolerance=4,
        note="corner",
    ),
    Row(
        ir.GatherNode,
        {"x": X, "indices": [torch.tensor([3, 0], dtype=I32), torch.tensor([1, -1], dtype=I32)]},
        lambda x, indices: x[indices[0].long(), indices[1].long()].reshape(2, 1, 1, 6),
        {"axes": [0, 1], "slice_sizes": [1, 1, 6]},
    ),
]

COVERED = {ir.TakeNode}


@pytest.mark.parametrize("row, dtype", cases(ROWS))
def test_row(row, dtype):
    check(row, dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8, torch.uint32])
def test_take_by_tensor(dtype):
    g = Graph()
    x, i = g.input((4, 300)), g.input((2, 2), dtype)
    g.emit(ir.TakeNode(x=x, index=at(tid=i), out=g.output((4, 2, 2)), axis=1))
    data, index = random(4, 300), torch.tensor([[0, 3], [100, 7]])
    assert torch.equal(g.run(data, index.to(dtype))[0], data[:, index])


def shifted(g, dtype=I32):
    """Indices that only the graph knows: the input plus 0."""
    i, t = g.input((3,), dtype), g.temp()
    g.emit(ir.AddNode(a=i, b=g.constant(torch.zeros(3, dtype=dtype)), out=t))
    return t


def test_computed_indices_scatter():
    g = Graph()
    dst, update = g.input((4, 5)), g.input((4, 3))
    g.emit(ir.IndexCopyNode(dst=dst, update=update, indices=shifted(g), out=g.output((4, 5)), axis=1))
    x, y, i = random(4, 5), random(4, 3), torch.tensor([4, 0, 2])
    assert torch.equal(g.run(x, y, i.to(I32))[0], x.index_copy(1, i, y))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.int64])
def test_computed_indices_are_clamped(dtype):
    """What MLX would read far outside of the array stays inside of it."""
    g = Graph()
    x = g.input((5,))
    g.emit(ir.TakeNode(x=x, index=at(tid=shifted(g, dtype)), out=g.output((3,)), axis=0))
    data = random(5)
    (result,) = g.run(data, torch.tensor([100, 4, 1]).to(dtype))
    assert torch.equal(result, data[torch.tensor([4, 4, 1])])


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda x, i, out: ir.TakeNode(x=x, index=at(tid=i), out=out, axis=1), "index 9 is outside [-5, 5)"),
        (lambda x, i, out: ir.TakeNode(x=x, index=at(7), out=out, axis=1), "index 7 is outside [-5, 5)"),
        (lambda x, i, out: ir.TakeNode(x=x, index=at(0), out=out, axis=3), "axis 3 is outside [-3, 3)"),
        (
            lambda x, i, out: ir.GatherNode(x=x, indices=[i], out=out, axes=[1], slice_sizes=[4, 2, 6]),
            "index 9 is outside [0, 4)",
        ),
        (
            lambda x, i, out: ir.GatherNode(x=x, indices=[i], out=out, axes=[1], slice_sizes=[4, 9, 6]),
            "slice size 9 on axis 1 is outside [0, 5]",
        ),
        (
            lambda x, i, out: ir.IndexCopyNode(dst=x, update=x, indices=i, out=out, axis=1),
            "update is of shape [4,5,6], [4,2,6] was expected",
        ),
        (
            lambda x, i, out: ir.SliceUpdateNode(
                dst=x, update=x, out=out, axis=lit(1), start=lit(3), stop=lit(8)
            ),
            "update has 5 rows for the 2 of [3, 5) on axis 1",
        ),
    ],
)
def test_indices_out_of_range_are_errors(make, said, capfd):
    g = Graph()
    x, i, out = g.input((4, 5, 6)), g.input((2,), I32), g.output((1,))
    g.emit(make(x, i, out))
    with pytest.raises(RuntimeError):
        g.run(X, torch.tensor([0, 9], dtype=I32))
    assert said in capfd.readouterr().err


def test_reads_of_empty_slots_are_errors(capfd):
    g = Graph()
    g.emit(ir.ReshapeNode(x=g.temp(), out=g.output((1,)), shape=lits(1)))
    with pytest.raises(RuntimeError):
        g.run()
    assert "reads tensor slot 1, which nothing has written" in capfd.readouterr().err
