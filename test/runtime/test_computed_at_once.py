"""What the CPU computes while a call runs its instructions: views, kernels, and updates of buffers in place."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from irprograms import Graph, ir, lit, lits

INT64 = torch.int64


def rows(start, stop):
    return {"axis": lit(0), "start": lit(start), "stop": lit(stop)}


def updated_buffer() -> Graph:
    """A program that writes x [2, 4] to rows 1 and 2 of a buffer [6, 4], and 2 * x to rows 2 and 3.

    It then takes element `index` of a vector with three elements. It returns the buffer and the element.
    """
    g = Graph()
    x, index, out = g.input((2, 4)), g.input((), INT64), g.output((6, 4))
    buffer, double, taken = g.buffer((6, 4)), g.new_temp(), g.output(())
    vector = g.constant(torch.arange(3.0))
    g.emit(
        ir.AddNode(a=x, b=x, out=double),
        ir.SliceUpdateNode(dst=buffer, update=x, out=buffer, **rows(1, 3)),
        ir.SliceUpdateNode(dst=buffer, update=double, out=buffer, **rows(2, 4)),
        ir.TakeNode(x=vector, index=ir.IntOrVidOrTid(tid=index, kind=2), out=taken, axis=0),
        ir.IdCopyNode(x=buffer, out=out),
    )
    return g


def test_failed_call_undoes_updates_in_place():
    model = updated_buffer().load()
    expected = torch.zeros(6, 4)
    for step in range(1, 5):
        x = torch.full((2, 4), float(step))
        with pytest.raises(RuntimeError):
            model(x + 100, torch.tensor(3))  # out of range, after both updates
        expected[1:3] = x
        expected[2:4] = 2 * x
        assert torch.equal(model(x, torch.tensor(1))[0], expected), step


def test_view_of_a_buffer_keeps_its_elements_when_the_buffer_is_updated():
    g = Graph()
    x, before, after = g.input((2, 4)), g.output((2, 4)), g.output((6, 4))
    buffer, view = g.buffer((6, 4)), g.new_temp()
    g.emit(
        ir.SliceNode(x=buffer, out=view, **rows(1, 3)),
        ir.SliceUpdateNode(dst=buffer, update=x, out=buffer, **rows(0, 2)),
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
        ir.SliceUpdateNode(dst=buffer, update=x, out=buffer, **rows(0, 4)),
        ir.SliceNode(x=buffer, out=view, **rows(1, 4)),
        ir.SliceUpdateNode(dst=buffer, update=view, out=buffer, **rows(0, 3)),
        ir.IdCopyNode(x=buffer, out=out),
    )
    model = g.load()
    for step in range(3):
        x = torch.arange(8.0).reshape(4, 2) + step
        assert torch.equal(model(x)[0], torch.cat([x[1:], x[3:]]))


# -- views -------------------------------------------------------------------------


@st.composite
def chains_of_views(draw):
    """A shape, and a list of arguments for `apply`: the name of an operation, and a generator for its parameters."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    steps = draw(st.lists(st.sampled_from(["reshape", "transpose", "slice", "take", "expand", "squeeze", "add"]), max_size=6))
    return shape, [(step, draw(st.randoms(use_true_random=False))) for step in steps]


def apply(g: Graph, step: str, random, x, value: torch.Tensor):
    """Emits an instruction that applies `step` to the slot `x`. Returns the slot of the result, and `step` of `value`.

    If the shape does not permit the step, the instruction is an addition.
    """
    y = g.new_temp()
    if step == "reshape":
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
    if step == "transpose":
        perm = random.sample(range(value.ndim), value.ndim)
        g.emit(ir.TransposeNode(x=x, perm=perm, out=y))
        return y, value.permute(perm)
    if step == "slice" and value.ndim:
        axis = random.randrange(value.ndim)
        start, stride = random.randrange(value.shape[axis]), random.randint(1, 2)
        g.emit(ir.SliceNode(x=x, axis=lit(axis), start=lit(start), stop=lit(value.shape[axis]), step=stride, out=y))
        return y, value.movedim(axis, 0)[start::stride].movedim(0, axis)
    if step == "take" and value.ndim > 1:
        axis = random.randrange(value.ndim)
        index = random.randrange(value.shape[axis])
        g.emit(ir.TakeNode(x=x, index=ir.IntOrVidOrTid(literal=index, kind=0), axis=axis, out=y))
        return y, value.select(axis, index)
    if step == "expand" and value.ndim < 5:
        axis = random.randint(0, value.ndim)
        g.emit(ir.ExpandDimsNode(x=x, axis=axis, out=y))
        return y, value.unsqueeze(axis)
    if step == "squeeze" and 1 in value.shape and value.ndim > 1:
        axis = list(value.shape).index(1)
        g.emit(ir.SqueezeNode(x=x, dims=[axis], out=y))
        return y, value.squeeze(axis)
    g.emit(ir.AddNode(a=x, b=x, out=y))  # a kernel that makes its operand contiguous
    return y, value + value


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(chains_of_views())
def test_chains_of_views(case):
    shape, steps = case
    g = Graph()
    x = g.input(tuple(shape))
    value = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    slot, expected = x, value
    for step, random in steps:
        slot, expected = apply(g, step, random, slot, expected)
    g.emit(ir.IdCopyNode(x=slot, out=g.output(tuple(expected.shape))))
    assert torch.equal(g.run(value)[0], expected)
