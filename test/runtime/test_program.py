"""create, scalar, random and control; and what a program does from call to call."""

import pytest
import torch
from harness import Graph, ir, lit, lits, number, var
from rows import random

import executorch_mlx.custom_ops  # noqa: F401  (the reference of RandomBitsNode)

I32, I64 = torch.int32, torch.int64


def item(g, tid):
    vid = g.value()
    g.emit(ir.ItemIntNode(x=tid, out=vid))
    return vid


# -- create ----------------------------------------------------------------------


@pytest.mark.parametrize("start, stop, step", [(0, 5, 1), (7, -3, -3), (2, 2, 1), (-4, 9, 4)])
@pytest.mark.parametrize("dtype, tag", [(I32, None), (I64, 4), (torch.float32, 6)])
def test_arange(start, stop, step, dtype, tag):
    want = torch.arange(start, stop, step, dtype=dtype)
    g = Graph()
    g.emit(
        ir.ARangeNode(
            out=g.output(want.shape, dtype),
            start=lit(start), stop=lit(stop), step=lit(step), scalar_type=tag,
        )
    )  # fmt: skip
    assert torch.equal(g.run()[0], want)


@pytest.mark.parametrize("dtype, tag", [(I64, 4), (torch.float32, 6), (torch.bool, 11), (torch.uint8, 0)])
def test_full(dtype, tag):
    g = Graph()
    x, like = g.input((2,), dtype), g.temp()
    g.emit(
        ir.FullNode(out=g.output((2, 3), dtype), shape=lits(2, 3), v=number(7.0), scalar_type=tag),
        ir.FullLikeNode(x=x, out=like, v=number(1.0)),
        ir.IdCopyNode(x=like, out=g.output((2,), dtype)),
    )
    full, ones = g.run(torch.zeros(2, dtype=dtype))
    assert torch.equal(full, torch.full((2, 3), 7).to(dtype))
    assert torch.equal(ones, torch.ones(2).to(dtype))


def test_triangles():
    g = Graph()
    x = g.input((3, 4))
    g.emit(
        ir.TriNode(out=g.output((3, 4)), n=lit(3), m=lit(4), k=1, scalar_type=6),
        ir.TrilNode(x=x, out=g.output((3, 4)), k=-1),
        ir.TriuNode(x=x, out=g.output((3, 4)), k=1),
    )
    data = random(3, 4)
    tri, lower, upper = g.run(data)
    assert torch.equal(tri, torch.ones(3, 4).tril(1))
    assert torch.equal(lower, data.tril(-1)) and torch.equal(upper, data.triu(1))


# -- scalar ----------------------------------------------------------------------

INTEGERS = [
    (ir.AddIntNode, lambda a, b: a + b),
    (ir.SubtractIntNode, lambda a, b: a - b),
    (ir.MultiplyIntNode, lambda a, b: a * b),
    (ir.FloorDivideIntNode, lambda a, b: a // b),
    (ir.ModIntNode, lambda a, b: a % b),
]


@pytest.mark.parametrize("node, op", INTEGERS)
def test_integers_are_pythons(node, op):
    pairs = [(7, 2), (-7, 2), (7, -2), (-7, -2), (2**40, 3)]
    g = Graph()
    a, b = g.input((), I64), g.input((), I64)
    out = g.value()
    x, y = item(g, a), item(g, b)
    g.emit(node(a=var(x), b=var(y), out=out))
    g.output_value(out)
    model = g.load()
    for p, q in pairs:
        assert model(torch.tensor(p), torch.tensor(q)) == [op(p, q)]


@pytest.mark.parametrize(
    "node, a, b, said",
    [
        (ir.FloorDivideIntNode, 1, 0, "integer division by zero"),
        (ir.ModIntNode, 1, 0, "integer division by zero"),
        (ir.FloorDivideIntNode, -(2**63), -1, "overflows 64 bits"),
        (ir.AddIntNode, 2**63 - 1, 1, "overflows 64 bits"),
        (ir.MultiplyIntNode, 2**62, 4, "overflows 64 bits"),
    ],
)
def test_integer_faults_are_errors(node, a, b, said, capfd):
    g = Graph()
    out = g.value()
    g.emit(node(a=lit(a), b=lit(b), out=out))
    g.output_value(out)
    with pytest.raises(RuntimeError):
        g.run()
    assert said in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, I32, I64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("computed", [False, True])
def test_item(dtype, computed):
    g = Graph()
    x, t = g.input((1,), dtype), g.temp()
    g.emit(ir.ConcatenateNode(tensors=[x, x], out=t, axis=0), ir.SliceNode(
        x=t, out=t, axis=lit(0), start=lit(1), stop=lit(2)))  # fmt: skip
    g.output_value(item(g, t if computed else x))
    model = g.load()
    for value in (0, 1, 0, 1):
        assert model(torch.tensor([value], dtype=dtype)) == [value]


def test_sym_size():
    g = Graph()
    x, size = g.input(((1, 9), 3)), g.value()
    g.emit(ir.SymSizeNode(a=x, dim=-2, out=size))
    g.output_value(size)
    assert g.run(torch.zeros(5, 3)) == [5]


# -- random ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1, -1])
@pytest.mark.parametrize("width, dtype", [(1, torch.uint8), (2, torch.uint16), (4, torch.uint32)])
def test_seeded_bits_are_mlxs(seed, width, dtype):
    g = Graph()
    s = item(g, g.input((), I64))
    g.emit(ir.RandomBitsNode(out=g.output((3, 5), dtype), shape=lits(3, 5), seed=s, width=width))
    (bits,) = g.run(torch.tensor(seed))
    want = torch.ops.mlx.random_bits([3, 5], torch.tensor(seed), width)
    assert torch.equal(bits.view(torch.uint8), want.view(torch.uint8))


def test_unseeded_bits_differ():
    g = Graph()
    g.emit(ir.RandomBitsNode(out=g.output((8,), torch.uint32), shape=lits(8)))
    model = g.load()
    first = model()[0].clone()
    assert not torch.equal(first.to(I64), model()[0].to(I64))


# -- control ---------------------------------------------------------------------


def test_if_takes_one_chain():
    g = Graph()
    x, cond, y = g.input((2,)), g.input((1,), torch.bool), g.output((2,))
    chosen = item(g, cond)
    yes = g.chain(ir.ExpNode(x=x, out=y))
    no = g.chain(ir.NegNode(x=x, out=y))
    g.emit(ir.IfNode(cond=var(chosen), then_chain_idx=yes, else_chain_idx=no))
    model, data = g.load(), random(2)
    assert torch.equal(model(data, torch.tensor([False]))[0], -data)
    torch.testing.assert_close(model(data, torch.tensor([True]))[0], data.exp())


def test_scan_carries_and_stacks():
    g = Graph()
    x, total, out = g.input((2, 4, 3)), g.output((2, 3)), g.output((2, 4, 3))
    row = g.temp()
    body = g.chain(ir.AddNode(a=total, b=row, out=total), ir.ExpNode(x=total, out=out))
    g.emit(
        ir.FullNode(out=total, shape=lits(2, 3), v=number(0.0), scalar_type=6),
        ir.ScanNode(originals=[x], sliced=[row], outputs=[out], carry=[total], body_chain_idx=body),
    )
    data = random(2, 4, 3)
    last, steps = g.run(data)
    torch.testing.assert_close(last, data.sum(1))
    torch.testing.assert_close(steps, data.cumsum(1).exp())


def test_init_chain_runs_once_and_stays():
    g = Graph()
    x, y, b, t = g.input((2,)), g.output((2,)), g.buffer((2,)), g.temp()
    g.init_chain = g.chain(
        ir.FullNode(out=b, shape=lits(2), v=number(5.0), scalar_type=6), ir.NegNode(x=b, out=t)
    )
    g.emit(ir.AddNode(a=b, b=x, out=b), ir.AddNode(a=b, b=t, out=y))
    model, one = g.load(), torch.ones(2)
    assert [model(one)[0].tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


# -- buffers ---------------------------------------------------------------------


def cache(capacity=6, initial=None):
    """Writes a row at a position and returns the whole cache."""
    g = Graph()
    x, pos = g.input((1, 2)), g.input((1,), I64)
    b = g.buffer((capacity, 2), initial=initial)
    end, start = g.value(), item(g, pos)
    g.emit(
        ir.AddIntNode(a=var(start), b=lit(1), out=end),
        ir.SliceUpdateNode(dst=b, update=x, out=b, axis=lit(0), start=var(start), stop=var(end)),
        ir.IdCopyNode(x=b, out=g.output((capacity, 2))),
    )
    return g


@pytest.mark.parametrize("initial", [None, torch.full((6, 2), 3.0)])
def test_buffers_persist(initial):
    model, want = cache(initial=initial).load(), torch.zeros(6, 2) if initial is None else initial.clone()
    for step in (0, 3, 1, 3):
        want[step] = step + 1.0
        assert torch.equal(model(torch.full((1, 2), step + 1.0), torch.tensor([step]))[0], want)
    fresh = cache(initial=initial).load()
    assert fresh(torch.zeros(1, 2), torch.tensor([0]))[0][3].tolist() != want[3].tolist()


def test_a_failed_call_leaves_buffers_alone(capfd):
    """The second update of the call fails, after the first was made."""
    g = Graph()
    x, pos, b = g.input((1,)), g.input((1,), I64), g.buffer((4,))
    first = item(g, pos)
    index = ir.IntOrVidOrTid(kind=1, vid=first)
    t = g.temp()
    g.emit(
        ir.AddNode(a=b, b=x, out=b),
        ir.TakeNode(x=b, index=index, out=t, axis=0),
        ir.IdCopyNode(x=b, out=g.output((4,))),
    )
    model, one = g.load(), torch.ones(1)
    assert model(one, torch.tensor([0]))[0].tolist() == [1] * 4
    for _ in range(3):
        with pytest.raises(RuntimeError):
            model(one, torch.tensor([9]))
    assert "(TakeNode): index 9 is outside [-4, 4)" in capfd.readouterr().err
    assert model(one, torch.tensor([0]))[0].tolist() == [2] * 4


def test_a_value_of_an_updated_buffer_can_be_read_back_midway():
    g = Graph()
    x, b, t = g.input((1,)), g.buffer((4,)), g.temp()
    g.emit(
        ir.SliceUpdateNode(dst=b, update=x, out=b, axis=lit(0), start=lit(1), stop=lit(2)),
        ir.SliceNode(x=b, out=t, axis=lit(0), start=lit(1), stop=lit(2)),
    )
    value = item(g, t)
    g.output_value(value)
    g.emit(ir.AddNode(a=b, b=x, out=b), ir.IdCopyNode(x=b, out=g.output((4,))))
    model = g.load()
    assert model(torch.tensor([3.0]))[0] == 3
    got = model(torch.tensor([2.0]))
    assert got[0] == 2 and got[1].tolist() == [5, 4, 5, 5]


def test_updates_are_made_in_place():
    """Writing one row of a 32 MB buffer takes no second buffer."""
    import mlx.core as mx

    capacity = 1 << 17
    g = Graph()
    x, b = g.input((1, 64)), g.buffer((capacity, 64))
    g.emit(
        ir.SliceUpdateNode(dst=b, update=x, out=b, axis=lit(0), start=lit(2), stop=lit(3)),
        ir.SliceNode(x=b, out=g.output((4, 64)), axis=lit(0), start=lit(0), stop=lit(4)),
    )
    model, row = g.load(), torch.ones(1, 64)
    model(row)  # the first call may be undone, and copies
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        model(row)
    assert mx.get_peak_memory() - before < capacity * 64


def test_dynamic_shapes_within_bounds():
    g = Graph()
    x = g.input(((1, 8), 2))
    g.emit(ir.ExpNode(x=x, out=g.output(((1, 8), 2))))
    model = g.load()
    for rows in (3, 8, 1):
        data = random(rows, 2)
        torch.testing.assert_close(model(data)[0], data.exp())


def test_transposed_outputs_are_copied_in_order():
    g = Graph()
    g.emit(ir.TransposeNode(x=g.input((2, 3, 4)), out=g.output((4, 2, 3)), perm=[2, 0, 1]))
    x = random(2, 3, 4)
    assert torch.equal(g.run(x)[0], x.permute(2, 0, 1))
