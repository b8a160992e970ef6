"""Nodes that create tensors, compute with integers, draw random bits or control the flow, and mutable buffers."""

import sys
import threading
from pathlib import Path

import executorch_mlx.custom_ops  # noqa: F401  (registers torch.ops.mlx.random_bits)
import pytest
import torch
from executorch_mlx import reset
from irprograms import FLOAT32, Graph, ir, lit, lits, number, value_of
from irprograms.node_case import random

I32, I64 = torch.int32, torch.int64


# -- create ----------------------------------------------------------------------


@pytest.mark.parametrize("start, stop, step", [(0, 5, 1), (7, -3, -3), (2, 2, 1), (-4, 9, 4)])
@pytest.mark.parametrize("dtype, scalar_type", [(I32, None), (I64, 4), (torch.float32, 6)])
def test_arange_matches_torch(start, stop, step, dtype, scalar_type):
    expected = torch.arange(start, stop, step, dtype=dtype)
    g = Graph()
    g.emit(
        ir.ARangeNode(
            out=g.output(expected.shape, dtype),
            start=lit(start),
            stop=lit(stop),
            step=lit(step),
            scalar_type=scalar_type,
        )
    )
    assert torch.equal(g.run()[0], expected)


@pytest.mark.parametrize("dtype, scalar_type", [(I64, 4), (torch.float32, 6), (torch.bool, 11), (torch.uint8, 0)])
def test_full_and_full_like_match_torch(dtype, scalar_type):
    g = Graph()
    x, like = g.input((2,), dtype), g.new_temp()
    g.emit(
        ir.FullNode(out=g.output((2, 3), dtype), shape=lits(2, 3), v=number(7.0), scalar_type=scalar_type),
        ir.FullLikeNode(x=x, out=like, v=number(1.0)),
        ir.IdCopyNode(x=like, out=g.output((2,), dtype)),
    )
    full, ones = g.run(torch.zeros(2, dtype=dtype))
    assert torch.equal(full, torch.full((2, 3), 7).to(dtype))
    assert torch.equal(ones, torch.ones(2).to(dtype))


def test_tri_tril_and_triu_match_torch():
    g = Graph()
    x = g.input((3, 4))
    g.emit(
        ir.TriNode(out=g.output((3, 4)), n=lit(3), m=lit(4), k=1, scalar_type=FLOAT32),
        ir.TrilNode(x=x, out=g.output((3, 4)), k=-1),
        ir.TriuNode(x=x, out=g.output((3, 4)), k=1),
    )
    data = random(3, 4)
    tri, lower, upper = g.run(data)
    assert torch.equal(tri, torch.ones(3, 4).tril(1))
    assert torch.equal(lower, data.tril(-1)) and torch.equal(upper, data.triu(1))


# -- scalar ----------------------------------------------------------------------

INTEGER_OPERATIONS = [
    (ir.AddIntNode, lambda a, b: a + b),
    (ir.SubtractIntNode, lambda a, b: a - b),
    (ir.MultiplyIntNode, lambda a, b: a * b),
    (ir.FloorDivideIntNode, lambda a, b: a // b),
    (ir.ModIntNode, lambda a, b: a % b),
]


@pytest.mark.parametrize("node, op", INTEGER_OPERATIONS)
def test_integer_arithmetic_matches_python(node, op):
    pairs = [(7, 2), (-7, 2), (7, -2), (-7, -2), (2**40, 3)]
    g = Graph()
    a, b = g.input((), I64), g.input((), I64)
    out = g.new_value()
    x, y = g.item(a), g.item(b)
    g.emit(node(a=value_of(x), b=value_of(y), out=out))
    g.output_value(out)
    model = g.load()
    for p, q in pairs:
        assert model(torch.tensor(p), torch.tensor(q)) == [op(p, q)]


LOWEST, HIGHEST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("a", [5, -5, 0, LOWEST, HIGHEST])
@pytest.mark.parametrize("b", [LOWEST, HIGHEST, -1, 3])
def test_remainder_of_extremes_matches_python(a, b):
    g = Graph()
    out = g.new_value()
    g.emit(ir.ModIntNode(a=lit(a), b=lit(b), out=out))
    g.output_value(out)
    assert g.run() == [a % b]


@pytest.mark.parametrize(
    "node, a, b, message",
    [
        (ir.FloorDivideIntNode, 1, 0, "integer division by zero"),
        (ir.ModIntNode, 1, 0, "integer division by zero"),
        (ir.FloorDivideIntNode, -(2**63), -1, "overflows 64 bits"),
        (ir.AddIntNode, 2**63 - 1, 1, "overflows 64 bits"),
        (ir.MultiplyIntNode, 2**62, 4, "overflows 64 bits"),
    ],
)
def test_integer_overflow_and_division_by_zero_are_errors(node, a, b, message, capfd):
    g = Graph()
    out = g.new_value()
    g.emit(node(a=lit(a), b=lit(b), out=out))
    g.output_value(out)
    with pytest.raises(RuntimeError):
        g.run()
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, I32, I64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("computed", [False, True])
def test_item_reads_one_element(dtype, computed):
    g = Graph()
    x, t = g.input((1,), dtype), g.new_temp()
    g.emit(
        ir.ConcatenateNode(tensors=[x, x], out=t, axis=0),
        ir.SliceNode(x=t, out=t, axis=lit(0), start=lit(1), stop=lit(2)),
    )
    g.output_value(g.item(t if computed else x))
    model = g.load()
    for value in (0, 1, 0, 1):
        assert model(torch.tensor([value], dtype=dtype)) == [value]


def test_sym_size_returns_the_size():
    g = Graph()
    x, size = g.input(((1, 9), 3)), g.new_value()
    g.emit(ir.SymSizeNode(a=x, dim=-2, out=size))
    g.output_value(size)
    assert g.run(torch.zeros(5, 3)) == [5]


# -- random ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63 - 1, -1])
@pytest.mark.parametrize("width, dtype", [(1, torch.uint8), (2, torch.uint16), (4, torch.uint32)])
def test_seeded_random_bits_match_eager(seed, width, dtype):
    g = Graph()
    s = g.item(g.input((), I64))
    g.emit(ir.RandomBitsNode(out=g.output((3, 5), dtype), shape=lits(3, 5), seed=s, width=width))
    (bits,) = g.run(torch.tensor(seed))
    expected = torch.ops.mlx.random_bits([3, 5], torch.tensor(seed), width)
    assert torch.equal(bits.view(torch.uint8), expected.view(torch.uint8))


def test_unseeded_random_bits_differ_between_calls_and_threads():
    g = Graph()
    g.emit(ir.RandomBitsNode(out=g.output((8,), torch.uint32), shape=lits(8)))
    model = g.load()
    draws = []

    def draw():
        draws.append(tuple(model()[0].tolist()))

    draw(), draw()
    for _ in range(3):
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
    assert len(set(draws)) == 5


# -- control ---------------------------------------------------------------------


def test_if_runs_one_chain():
    g = Graph()
    x, cond, y = g.input((2,)), g.input((1,), torch.bool), g.output((2,))
    chosen = g.item(cond)
    yes = g.chain(ir.ExpNode(x=x, out=y))
    no = g.chain(ir.NegNode(x=x, out=y))
    g.emit(ir.IfNode(cond=value_of(chosen), then_chain_idx=yes, else_chain_idx=no))
    model, data = g.load(), random(2)
    assert torch.equal(model(data, torch.tensor([False]))[0], -data)
    torch.testing.assert_close(model(data, torch.tensor([True]))[0], data.exp())


def test_scan_updates_the_carry_and_stacks_outputs():
    g = Graph()
    x, total, out = g.input((2, 4, 3)), g.output((2, 3)), g.output((2, 4, 3))
    part = g.new_temp()
    body = g.chain(ir.AddNode(a=total, b=part, out=total), ir.ExpNode(x=total, out=out))
    g.emit(
        ir.FullNode(out=total, shape=lits(2, 3), v=number(0.0), scalar_type=FLOAT32),
        ir.ScanNode(originals=[x], sliced=[part], outputs=[out], carry=[total], body_chain_idx=body),
    )
    data = random(2, 4, 3)
    last, stacked = g.run(data)
    torch.testing.assert_close(last, data.sum(1))
    torch.testing.assert_close(stacked, data.cumsum(1).exp())


def test_init_chain_runs_once():
    g = Graph()
    x, y, b, t = g.input((2,)), g.output((2,)), g.buffer((2,)), g.new_temp()
    g.init_chain = g.chain(
        ir.FullNode(out=b, shape=lits(2), v=number(5.0), scalar_type=FLOAT32), ir.NegNode(x=b, out=t)
    )
    g.emit(ir.AddNode(a=b, b=x, out=b), ir.AddNode(a=b, b=t, out=y))
    model, one = g.load(), torch.ones(2)
    assert [model(one)[0].tolist() for _ in range(3)] == [[1, 1], [2, 2], [3, 3]]


# -- buffers ---------------------------------------------------------------------


def cache(capacity=6, initial=None):
    """A program that writes x [1, 2] at a position of a buffer and returns the buffer."""
    g = Graph()
    x, pos = g.input((1, 2)), g.input((1,), I64)
    b = g.buffer((capacity, 2), initial=initial)
    end, start = g.new_value(), g.item(pos)
    g.emit(
        ir.AddIntNode(a=value_of(start), b=lit(1), out=end),
        ir.SliceUpdateNode(dst=b, update=x, out=b, axis=lit(0), start=value_of(start), stop=value_of(end)),
        ir.IdCopyNode(x=b, out=g.output((capacity, 2))),
    )
    return g


@pytest.mark.parametrize("initial", [None, torch.full((6, 2), 3.0)])
def test_buffers_persist_between_calls(initial):
    model, expected = cache(initial=initial).load(), torch.zeros(6, 2) if initial is None else initial.clone()
    for position in (0, 3, 1, 3):
        expected[position] = position + 1.0
        assert torch.equal(model(torch.full((1, 2), position + 1.0), torch.tensor([position]))[0], expected)
    fresh = cache(initial=initial).load()
    assert fresh(torch.zeros(1, 2), torch.tensor([0]))[0][3].tolist() != expected[3].tolist()


def test_a_failed_call_does_not_change_buffers(capfd):
    """The call fails after it has updated the buffer."""
    g = Graph()
    x, pos, b = g.input((1,)), g.input((1,), I64), g.buffer((4,))
    first = g.item(pos)
    index = ir.IntOrVidOrTid(kind=1, vid=first)
    t = g.new_temp()
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
    assert "(TakeNode): index 9 is out of range [-4, 4)" in capfd.readouterr().err
    assert model(one, torch.tensor([0]))[0].tolist() == [2] * 4


def test_an_updated_buffer_can_be_read_in_the_same_call():
    g = Graph()
    x, b, t = g.input((1,)), g.buffer((4,)), g.new_temp()
    g.emit(
        ir.SliceUpdateNode(dst=b, update=x, out=b, axis=lit(0), start=lit(1), stop=lit(2)),
        ir.SliceNode(x=b, out=t, axis=lit(0), start=lit(1), stop=lit(2)),
    )
    value = g.item(t)
    g.output_value(value)
    g.emit(ir.AddNode(a=b, b=x, out=b), ir.IdCopyNode(x=b, out=g.output((4,))))
    model = g.load()
    assert model(torch.tensor([3.0]))[0] == 3
    total, contents = model(torch.tensor([2.0]))
    assert total == 2 and contents.tolist() == [5, 4, 5, 5]


def test_buffers_are_updated_in_place():
    """Writing one position of a 32 MB buffer does not allocate a second buffer."""
    import mlx.core as mx

    capacity = 1 << 17
    g = Graph()
    x, b = g.input((1, 64)), g.buffer((capacity, 64))
    g.emit(
        ir.SliceUpdateNode(dst=b, update=x, out=b, axis=lit(0), start=lit(2), stop=lit(3)),
        ir.SliceNode(x=b, out=g.output((4, 64)), axis=lit(0), start=lit(0), stop=lit(4)),
    )
    model, update = g.load(), torch.ones(1, 64)
    model(update)  # the first call keeps a backup and therefore copies the buffer
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        model(update)
    assert mx.get_peak_memory() - before < capacity * 64


def peak_memory_during(call) -> int:
    """Bytes by which the resident memory of the process grows while `call` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def size(key):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))

    before = size("VmRSS")
    call()
    return size("VmHWM") - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_buffer_takes_memory_only_where_it_is_written():
    """At load, in calls, and after a reset. The buffer has 256 MB. The outputs are two of its rows."""
    g, row = Graph(), 1 << 20
    x, index, buffer = g.input((1, 4)), g.input((1,), torch.int64), g.buffer((1 << 24, 4))
    g.emit(
        ir.IndexCopyNode(dst=buffer, update=x, indices=index, out=buffer, axis=0),
        *(ir.SliceNode(x=buffer, out=g.output((1, 4)), axis=lit(0), start=lit(i), stop=lit(i + 1)) for i in (row, 0)),
    )
    ones = torch.ones(1, 4)

    def run():
        model = g.load()
        assert [y[0, 0] for y in model(ones, torch.tensor([row]))] == [1, 0]
        assert [y[0, 0] for y in model(2 * ones, torch.tensor([0]))] == [1, 2]
        reset()
        assert [y[0, 0] for y in model(2 * ones, torch.tensor([0]))] == [0, 2]

    assert peak_memory_during(run) < 16 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loop_that_updates_a_buffer_keeps_no_copies():
    """Each of 128 iterations overwrites 1 MB of the buffer. A failed call leaves the buffer undefined."""
    width = 1 << 18
    g = Graph()
    x, row, index = g.input(((0, 128), 2, 1)), g.input((1, width)), g.input((1,), torch.int32)
    b, column, t = g.buffer((2, width)), g.new_temp(), g.new_temp()
    body = g.chain(
        ir.SliceUpdateNode(dst=b, update=row, out=b, axis=lit(0), start=lit(1), stop=lit(2)),
        ir.SliceUpdateNode(dst=b, update=column, out=b, axis=lit(1), start=lit(3), stop=lit(4)),
    )
    g.emit(ir.ScanNode(originals=[x], sliced=[column], outputs=[], carry=[], body_chain_idx=body, scan_axis=0))
    g.emit(ir.TakeNode(x=b, index=ir.IntOrVidOrTid(kind=1, vid=g.item(index)), out=t, axis=0))
    g.emit(ir.SliceNode(x=b, out=g.output((2, 4)), axis=lit(1), start=lit(0), stop=lit(4)))
    model, ones = g.load(), torch.ones(1, width)

    def call(iterations=128, value=1, index=0):
        numbers = torch.arange(float(iterations)).reshape(-1, 1, 1).repeat(1, 2, 1)
        return model(numbers, value * ones, torch.tensor([index], dtype=torch.int32))[0].tolist()

    def failing_call():
        with pytest.raises(RuntimeError):
            call(128, 2, index=2)

    assert call() == [[0, 0, 0, 127], [1, 1, 1, 127]]
    assert peak_memory_during(failing_call) < 16 << 20
    with pytest.raises(RuntimeError, match="the mutable buffers are undefined"):
        call(0)
    reset()
    assert call(0) == [[0, 0, 0, 0], [0, 0, 0, 0]]
    assert call(5, 3) == [[0, 0, 0, 4], [3, 3, 3, 4]]


def test_dynamic_inputs_accept_sizes_within_bounds():
    g = Graph()
    x = g.input(((1, 8), 2))
    g.emit(ir.ExpNode(x=x, out=g.output(((1, 8), 2))))
    model = g.load()
    for size in (3, 8, 1):
        data = random(size, 2)
        torch.testing.assert_close(model(data)[0], data.exp())


def test_transposed_outputs_are_copied_row_major():
    g = Graph()
    g.emit(ir.TransposeNode(x=g.input((2, 3, 4)), out=g.output((4, 2, 3)), perm=[2, 0, 1]))
    x = random(2, 3, 4)
    assert torch.equal(g.run(x)[0], x.permute(2, 0, 1))
