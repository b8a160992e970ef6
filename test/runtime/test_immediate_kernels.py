"""What the runtime computes on the CPU immediately, when a call reaches the instruction, and not lazily through MLX.

These are views, kernels, elementwise groups, and updates of buffers in place.
"""

import math
import random
import resource
import sys
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from executorch_mlx import memory, reset
from hypothesis import given, settings
from irprograms import FLOAT32, Graph, ir, lit, lits, number, value_of

INT64 = torch.int64
LONG = 4  # the number of torch.int64


def row_range(start, stop):
    """The fields of an instruction that slices rows `start` to `stop - 1`."""
    return {"axis": lit(0), "start": lit(start), "stop": lit(stop)}


def program_that_updates_a_buffer() -> Graph:
    """A program that writes x [2, 4] to rows 1 and 2 of a buffer [6, 4], and 2 * x to rows 2 and 3.

    Then it takes element `index` of a vector with three elements. The results are the buffer and the element.
    """
    g = Graph()
    x, index, out = g.input((2, 4)), g.input((), INT64), g.output((6, 4))
    buffer, double, taken = g.buffer((6, 4)), g.new_temp(), g.output(())
    vector = g.constant(torch.arange(3.0))
    g.emit(
        ir.AddNode(a=x, b=x, out=double),
        ir.SliceUpdateNode(dst=buffer, update=x, out=buffer, **row_range(1, 3)),
        ir.SliceUpdateNode(dst=buffer, update=double, out=buffer, **row_range(2, 4)),
        ir.TakeNode(x=vector, index=ir.IntOrVidOrTid(tid=index, kind=2), out=taken, axis=0),
        ir.IdCopyNode(x=buffer, out=out),
    )
    return g


def test_failed_call_after_an_update_leaves_the_buffers_undefined(capfd):
    model = program_that_updates_a_buffer().load()
    expected = torch.zeros(6, 4)
    for step in range(1, 5):
        x = torch.full((2, 4), float(step))
        expected[1:3] = x
        expected[2:4] = 2 * x
        assert torch.equal(model(x, torch.tensor(1))[0], expected), step
    with pytest.raises(RuntimeError):
        model(x + 100, torch.tensor(3))  # out of range, after both updates
    assert "the mutable buffers of the program are undefined now" in capfd.readouterr().err
    for _ in range(2):
        with pytest.raises(RuntimeError):
            model(x, torch.tensor(1))
        assert "undefined since a call failed: reset them" in capfd.readouterr().err
    reset()
    expected = torch.zeros(6, 4)
    expected[1:3], expected[2:4] = x, 2 * x
    assert torch.equal(model(x, torch.tensor(1))[0], expected)


def random_updates(seed: int) -> tuple[Graph, Callable]:
    """A program that updates two buffers [6, 4], and a function that returns the updated buffers.

    The inputs are x [6, 4] and an index. Some updates are left to MLX, and the host reads values between the updates.
    The program fails after the last update if the index is not less than 3.
    """
    draw, g, steps = random.Random(seed), Graph(), []
    x, index = g.input((6, 4)), g.input((), INT64)
    buffers, vector = [g.buffer((6, 4)) for _ in range(2)], g.constant(torch.ones(3))

    def update_rows(i: int, is_lazy: bool):
        source, target, rows = draw.randrange(5), draw.randrange(5), g.new_temp()
        g.emit(ir.SliceNode(x=x, out=rows, **row_range(source, source + 2)))
        if is_lazy:
            g.emit(ir.SinNode(x=rows, out=rows))
        g.emit(ir.SliceUpdateNode(dst=buffers[i], update=rows, out=buffers[i], **row_range(target, target + 2)))

        def step(now, x):
            now[i] = now[i].clone()
            now[i][target : target + 2] = x[source : source + 2].sin() if is_lazy else x[source : source + 2]

        return step

    def update_all(i: int):
        g.emit(ir.SinNode(x=buffers[i], out=buffers[i]))
        return lambda now, x: now.__setitem__(i, now[i].sin())

    def copy(i: int):
        g.emit(ir.IdCopyNode(x=buffers[i], out=buffers[1 - i]))
        return lambda now, x: now.__setitem__(1 - i, now[i])

    def read(i: int):
        g.emit(ir.MaxNode(x=buffers[i], out=(largest := g.new_temp()), axes=[]))
        g.item(largest)
        return lambda now, x: None

    for _ in range(draw.randint(3, 9)):
        i = draw.randrange(2)
        updates = [
            partial(update_rows, i, False),
            partial(update_rows, i, True),
            partial(update_all, i),
            partial(copy, i),
        ]
        steps.append(draw.choice([*updates, *[partial(read, i)] * 3])())
    g.emit(ir.TakeNode(x=vector, index=ir.IntOrVidOrTid(tid=index, kind=2), out=g.new_temp(), axis=0))
    g.emit(*(ir.IdCopyNode(x=buffer, out=g.output((6, 4))) for buffer in buffers))

    def updated(now, x):
        now = list(now)
        for step in steps:
            step(now, x)
        return now

    return g, updated


@pytest.mark.parametrize("is_limited", [False, True])
@pytest.mark.parametrize("seed", range(24))
def test_failed_call_leaves_buffers_as_they_were_or_undefined(seed, is_limited, capfd):
    g, updated = random_updates(seed)
    model, expected = g.load(), [torch.zeros(6, 4)] * 2
    before = memory.set_memory_limit(1 << 40 if is_limited else None)
    try:
        for call in range(12):
            x = torch.linspace(-1, 1, 24).reshape(6, 4) * (call + 1)
            if call % 3:
                with pytest.raises(RuntimeError):
                    model(x, torch.tensor(3))
                if "undefined" in capfd.readouterr().err:
                    expected = [torch.zeros(6, 4)] * 2
                    reset()
            else:
                expected = updated(expected, x)
                for result, value in zip(model(x, torch.tensor(0)), expected, strict=True):
                    torch.testing.assert_close(result, value)
    finally:
        memory.set_memory_limit(before)


# -- what needs no evaluation --------------------------------------------------------


def waits_of(model, *inputs, calls: int = 100) -> int:
    """How often this thread waits for another one during `calls` calls: at least once for each evaluation by MLX."""
    model(*inputs)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    for _ in range(calls):
        model(*inputs)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before


@pytest.mark.skipif(sys.platform != "linux", reason="CPU kernels")
def test_branches_on_few_integers_wait_for_no_evaluation():
    """As in a head whose log probabilities nobody asks for: are they asked for in any row? If not, they are zeros."""
    g = Graph()
    enabled, rows = g.input((4,), INT64), g.input((4, 3), torch.bfloat16)
    outs = [g.output((4, 3), dtype) for dtype in (torch.float32, INT64)]
    on, one, two = g.new_temp(), g.new_temp(), g.new_temp()
    g.emit(
        ir.NotEqualNode(a=enabled, b=g.constant(torch.tensor(0)), out=on),
        ir.AnyNode(x=on, axes=[], out=one),
        ir.AllNode(x=on, axes=[0], keepdims=True, out=two),
    )
    zeros = g.chain(
        *(ir.FullLikeNode(x=rows, v=number(0), scalar_type=t, out=out) for t, out in zip((FLOAT32, LONG), outs))
    )
    ones = g.chain(
        *(ir.FullNode(shape=lits(4, 3), v=number(1), scalar_type=t, out=out) for t, out in zip((FLOAT32, LONG), outs))
    )
    sines = g.chain(ir.SinNode(x=outs[0], out=outs[0]))
    for condition, chains in ((one, (ones, zeros)), (two, (sines, g.chain()))):
        fields = dict(zip(("then_chain_idx", "else_chain_idx"), chains))
        g.emit(ir.IfNode(cond=value_of(g.item(condition)), **fields))
    model, x = g.load(), torch.zeros(4, 3, dtype=torch.bfloat16)
    none, some, every = (torch.tensor(values) for values in ([0, 0, 0, 0], [0, 0, 2, 0], [1, 2, 3, -1]))
    for flags, expected in ((none, 0.0), (some, 1.0), (every, math.sin(1))):
        floats, integers = model(flags, x)
        torch.testing.assert_close(floats, torch.full((4, 3), expected))
        assert torch.equal(integers, torch.full((4, 3), int(expected > 0)))
    assert waits_of(model, every, x) > 50  # MLX computes the sines
    assert waits_of(model, none, x) < 25
    assert waits_of(model, some, x) < 25


def broadcast(g: Graph, x, *shape: int) -> ir.Tid:
    g.emit(ir.BroadcastToNode(x=x, out=(y := g.new_temp()), shape=lits(*shape)))
    return y


def test_broadcast_operands():
    """The rows of an operand share memory: in an elementwise group, and as the addend of a product."""
    g = Graph()
    x, y, t = g.input((3, 1, 5)), g.input((3, 4, 2)), g.new_temp()
    wide, matrix = broadcast(g, x, 3, 4, 5), torch.randn(2, 5)
    g.emit(
        ir.AddmmNode(mat1=wide, mat2=g.constant(torch.ones(5, 5)), out=t),  # evaluates the operand
        ir.TanhNode(x=wide, out=t),
        ir.AddNode(a=t, b=wide, out=g.output((3, 4, 5))),
        ir.AddmmNode(mat1=y, mat2=g.constant(matrix), bias=wide, out=g.output((3, 4, 5))),
    )
    x, y = torch.randn(3, 1, 5), torch.randn(3, 4, 2)
    results = g.run(x, y)
    torch.testing.assert_close(results[0], (x.tanh() + x).expand(3, 4, 5))
    torch.testing.assert_close(results[1], y @ matrix + x)


def test_buffer_whose_elements_share_memory_is_updated():
    """The first call leaves a broadcast array in the buffer."""
    g = Graph()
    x, y, z = (g.input((1, 2, 1, 8)) for _ in range(3))
    rows, positions, out = g.buffer((1, 2, 4, 8)), g.buffer((1, 2, 4, 8)), g.output((1, 2, 4, 8))
    wide = broadcast(g, y, 1, 2, 4, 8)
    g.emit(
        ir.SliceUpdateNode(dst=rows, update=x, out=rows, axis=lit(2), start=lit(1), stop=lit(2)),
        ir.RowUpdateNode(dst=positions, update=x, out=positions, starts=lits(1)),
        ir.AddNode(a=rows, b=positions, out=out),
        ir.IdCopyNode(x=wide, out=rows),
        ir.IdCopyNode(x=broadcast(g, z, 1, 2, 4, 8), out=positions),
    )
    model, ones = g.load(), torch.ones(1, 2, 1, 8)
    model(ones, 2 * ones, 2 * ones)
    (result,) = model(5 * ones, ones, ones)
    assert result[0, 0, :, 0].tolist() == [4, 10, 4, 4]


def test_view_of_a_buffer_keeps_its_elements_when_the_buffer_is_updated():
    g = Graph()
    x, before, after = g.input((2, 4)), g.output((2, 4)), g.output((6, 4))
    buffer, view = g.buffer((6, 4)), g.new_temp()
    g.emit(
        ir.SliceNode(x=buffer, out=view, **row_range(1, 3)),
        ir.SliceUpdateNode(dst=buffer, update=x, out=buffer, **row_range(0, 2)),
        ir.IdCopyNode(x=view, out=before),
        ir.IdCopyNode(x=buffer, out=after),
    )
    model, expected = g.load(), torch.zeros(6, 4)
    for step in range(1, 4):
        x = torch.full((2, 4), float(step))
        seen, result = model(x)
        assert torch.equal(seen, expected[1:3]), step
        expected[:2] = x
        assert torch.equal(result, expected), step


def test_buffer_moves_within_itself():
    """Rows 1 to 3 are copied to rows 0 to 2. The update reads the memory that it writes."""
    g = Graph()
    x, out, buffer, view = g.input((4, 2)), g.output((4, 2)), g.buffer((4, 2)), g.new_temp()
    g.emit(
        ir.SliceUpdateNode(dst=buffer, update=x, out=buffer, **row_range(0, 4)),
        ir.SliceNode(x=buffer, out=view, **row_range(1, 4)),
        ir.SliceUpdateNode(dst=buffer, update=view, out=buffer, **row_range(0, 3)),
        ir.IdCopyNode(x=buffer, out=out),
    )
    model = g.load()
    for step in range(3):
        x = torch.arange(8.0).reshape(4, 2) + step
        assert torch.equal(model(x)[0], torch.cat([x[1:], x[3:]]))


# -- views -------------------------------------------------------------------------


@st.composite
def chains_of_views(draw):
    """The shape of the input, and a list of operations. An operation is a name and a generator for its parameters."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = st.sampled_from(["reshape", "transpose", "slice", "take", "expand_dims", "squeeze", "add"])
    return shape, [(name, draw(st.randoms(use_true_random=False))) for name in draw(st.lists(names, max_size=6))]


def apply(g: Graph, operation: str, random, x, value: torch.Tensor):
    """Emit an instruction that applies `operation` to the slot `x`, which holds `value`.

    Returns the slot of the result, and the result as torch computes it. If the shape of `value` does not permit the
    operation, the instruction is an addition.
    """
    y = g.new_temp()
    if operation == "reshape":  # may join two neighbouring axes, and splits the first axis of size 4
        sizes = list(value.shape)
        if len(sizes) > 1 and random.random() < 0.5:
            at = random.randrange(len(sizes) - 1)
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
        for i, size in enumerate(sizes):
            if size == 4:
                sizes[i : i + 1] = [2, 2]
                break
        if len(sizes) > 5:
            sizes = [value.numel()]
        g.emit(ir.ReshapeNode(x=x, shape=lits(*sizes), out=y))
        return y, value.reshape(sizes)
    if operation == "transpose":
        perm = random.sample(range(value.ndim), value.ndim)
        g.emit(ir.TransposeNode(x=x, perm=perm, out=y))
        return y, value.permute(perm)
    if operation == "slice" and value.ndim:
        axis = random.randrange(value.ndim)
        start, stride = random.randrange(value.shape[axis]), random.randint(1, 2)
        g.emit(ir.SliceNode(x=x, axis=lit(axis), start=lit(start), stop=lit(value.shape[axis]), step=stride, out=y))
        return y, value.movedim(axis, 0)[start::stride].movedim(0, axis)
    if operation == "take" and value.ndim > 1:
        axis = random.randrange(value.ndim)
        index = random.randrange(value.shape[axis])
        g.emit(ir.TakeNode(x=x, index=ir.IntOrVidOrTid(literal=index, kind=0), axis=axis, out=y))
        return y, value.select(axis, index)
    if operation == "expand_dims" and value.ndim < 5:
        axis = random.randint(0, value.ndim)
        g.emit(ir.ExpandDimsNode(x=x, axis=axis, out=y))
        return y, value.unsqueeze(axis)
    if operation == "squeeze" and 1 in value.shape and value.ndim > 1:
        axis = list(value.shape).index(1)
        g.emit(ir.SqueezeNode(x=x, dims=[axis], out=y))
        return y, value.squeeze(axis)
    g.emit(ir.AddNode(a=x, b=x, out=y))  # the kernel of an addition makes its operand contiguous first
    return y, value + value


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(chains_of_views())
def test_chains_of_views(case):
    shape, operations = case
    g = Graph()
    x = g.input(tuple(shape))
    value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    slot, expected = x, value
    for operation, draws in operations:
        slot, expected = apply(g, operation, draws, slot, expected)
    g.emit(ir.IdCopyNode(x=slot, out=g.output(tuple(expected.shape))))
    assert torch.equal(g.run(value)[0], expected)


# -- groups of elementwise instructions ----------------------------------------------


def slice_columns(x, start, stop, out):
    return ir.SliceNode(x=x, axis=lit(-1), start=lit(start), stop=lit(stop), out=out)


BINARY = {"Add": torch.add, "Subtract": torch.sub, "Multiply": torch.mul, "Maximum": torch.maximum}
UNARY = {"Sigmoid": torch.sigmoid, "Tanh": torch.tanh, "Silu": torch.nn.functional.silu}


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(st.data())
def test_elementwise_groups(data):
    """Random instructions over few slots, so that instructions in and after a group read and overwrite its slots."""
    shape = data.draw(st.sampled_from([(6,), (1, 6), (5, 6), (2, 3, 6), (3000, 6), (7, 3000)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(0)
    g = Graph()
    inputs = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    row, number = torch.randn(shape[-1], generator=generator).to(dtype), torch.tensor(0.5, dtype=dtype)
    slots = [g.input(shape, dtype), g.input(shape, dtype), g.constant(row), g.constant(number)]
    slots += [g.new_temp() for _ in range(4)]
    values = dict(enumerate([*inputs, row, number]))
    for _ in range(data.draw(st.integers(2, 12))):
        out = data.draw(st.integers(4, 7))
        a = data.draw(st.sampled_from([i for i in values if i not in (2, 3)]))
        op = data.draw(st.sampled_from([*BINARY, *UNARY, "Copy", "Columns", "Split", "Negative"]))
        if op in BINARY:
            compatible = [i for i, v in values.items() if v.ndim == 0 or v.shape[-1] == values[a].shape[-1]]
            b = data.draw(st.sampled_from(compatible))
            g.emit(getattr(ir, f"{op}Node")(a=slots[a], b=slots[b], out=slots[out]))
            values[out] = BINARY[op](values[a], values[b])
        elif op in UNARY:
            g.emit(getattr(ir, f"{op}Node")(x=slots[a], out=slots[out]))
            values[out] = UNARY[op](values[a])
        elif op == "Copy":
            g.emit(ir.IdCopyNode(x=slots[a], out=slots[out]))
            values[out] = values[a]
        elif op == "Columns" and out != a:
            start = data.draw(st.integers(0, values[a].shape[-1] - 1))
            g.emit(slice_columns(slots[a], start, 10000, slots[out]))
            values[out] = values[a][..., start:]
        elif op == "Split" and values[a].shape[-1] > 4 and a not in (4, 5):
            size = values[a].shape[-1] // 2 + 1
            g.emit(ir.SplitNode(x=slots[a], sizes=lits(size), axis=-1, outs=[slots[4], slots[5]]))
            values[4], values[5] = values[a].split(size, -1)
        else:  # "Negative", or an operation that does not fit: a NegNode, which ends a group
            g.emit(ir.NegNode(x=slots[a], out=slots[out]))
            values[out] = -values[a]
    results = [i for i in values if i > 3]
    for i in results:
        g.emit(ir.IdCopyNode(x=slots[i], out=g.output(tuple(values[i].shape), dtype)))
    tolerance = 1e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    for result, i in zip(g.run(*inputs), results, strict=True):
        torch.testing.assert_close(result, values[i], rtol=tolerance, atol=tolerance)


def test_group_keeps_what_the_next_iteration_reads():
    """The body reads what the iteration before wrote to the temporary `last`, although `last` is not in `carry`."""
    g = Graph()
    x, out = g.input((40, 2, 3)), g.output((40, 2, 3))
    part, last, square, y = (g.new_temp() for _ in range(4))
    body = g.chain(
        ir.NegNode(x=last, out=y), ir.MultiplyNode(a=part, b=part, out=square), ir.AddNode(a=square, b=part, out=last)
    )
    g.emit(
        ir.MultiplyNode(a=x, b=x, out=square),
        slice_columns(square, 0, 3, last),
        ir.TakeNode(x=last, index=ir.IntOrVidOrTid(literal=0, kind=0), out=last, axis=0),
        ir.ScanNode(originals=[x], sliced=[part], outputs=[y], carry=[], body_chain_idx=body, scan_axis=0),
        ir.IdCopyNode(x=y, out=out),
    )
    data = torch.randn(40, 2, 3, generator=torch.Generator().manual_seed(0))
    expected = -torch.cat([data[:1] ** 2, (data**2 + data)[:-1]])
    torch.testing.assert_close(g.run(data)[0], expected)


def test_group_keeps_what_another_chain_reads():
    """The main chain writes `t`, a group in a branch overwrites it, and then the main chain reads it."""
    g = Graph()
    x, flag, out, t = g.input((2, 3)), g.input((1,), torch.bool), g.output((2, 3)), g.new_temp()
    chosen = g.item(flag)
    then = g.chain(ir.MultiplyNode(a=x, b=x, out=t), ir.AddNode(a=t, b=x, out=t))
    other = g.chain()
    g.emit(
        ir.AddNode(a=x, b=x, out=t),
        ir.TanhNode(x=t, out=t),
        ir.IfNode(cond=ir.IntOrVid(vid=chosen, is_vid=True), then_chain_idx=then, else_chain_idx=other),
        ir.NegNode(x=t, out=out),
    )
    model, data = g.load(), torch.tensor([[0.5, 1.0, -2.0], [0.0, 3.0, 0.25]])
    torch.testing.assert_close(model(data, torch.tensor([True]))[0], -(data * data + data))
    torch.testing.assert_close(model(data, torch.tensor([False]))[0], -(2 * data).tanh())


@pytest.mark.parametrize("columns_of_x", [5, 7])
def test_split_that_does_not_fit_is_an_error_in_a_group(columns_of_x, capfd):
    g = Graph()
    x, out = g.input((2, columns_of_x)), g.output((2, 3))
    y, first, second = (g.new_temp() for _ in range(3))
    g.emit(
        ir.TanhNode(x=x, out=y),
        ir.SplitNode(x=y, sizes=lits(2 if columns_of_x == 5 else 3), axis=-1, outs=[first, second]),
        ir.AddNode(a=first, b=first, out=out),
    )
    with pytest.raises(RuntimeError):
        g.run(torch.ones(2, columns_of_x))
    assert "instruction 1 (SplitNode)" in capfd.readouterr().err


# -- products in loops ---------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_products_in_long_and_short_loops_give_the_same_bits(rows):
    """In long loops, the runtime packs the matrix before the first iteration."""

    def loop(length):
        g = Graph()
        x, state, out = g.input((length, rows, 50)), g.input((rows, 50)), g.output((rows, 50))
        matrix = g.constant(torch.randn(50, 50, generator=torch.Generator().manual_seed(1)) / 7)
        part, carry = g.new_temp(), g.new_temp()
        body = g.chain(ir.AddmmNode(mat1=carry, mat2=matrix, bias=part, out=carry))
        g.emit(
            ir.IdCopyNode(x=state, out=carry),
            ir.ScanNode(originals=[x], sliced=[part], outputs=[], carry=[carry], body_chain_idx=body, scan_axis=0),
            ir.IdCopyNode(x=carry, out=out),
        )
        return g.load()

    x = torch.randn(64, rows, 50, generator=torch.Generator().manual_seed(0))
    short, expected = loop(8), torch.zeros(rows, 50)
    for i in range(0, 64, 8):
        (expected,) = short(x[i : i + 8], expected)
    assert torch.equal(loop(64)(x, torch.zeros(rows, 50))[0], expected)


def test_matrix_that_the_loop_changes_is_not_packed():
    """The second operand of the product is the carry of the loop, which holds powers of the matrix."""
    g = Graph()
    x, out = g.input((40, 4)), g.output((4, 4))
    start = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()).Q
    part, carry = g.new_temp(), g.new_temp()
    body = g.chain(ir.AddmmNode(mat1=(matrix := g.constant(start.float())), mat2=carry, out=carry))
    g.emit(
        ir.IdCopyNode(x=matrix, out=carry),
        ir.ScanNode(originals=[x], sliced=[part], outputs=[], carry=[carry], body_chain_idx=body, scan_axis=0),
        ir.IdCopyNode(x=carry, out=out),
    )
    expected = torch.linalg.matrix_power(start, 41).float()
    torch.testing.assert_close(g.run(torch.zeros(40, 4))[0], expected, rtol=0, atol=1e-5)
