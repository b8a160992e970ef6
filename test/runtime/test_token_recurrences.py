"""The CPU kernels of recurrences over tokens, and the nodes that use them."""

import ctypes
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from executorch_mlx.custom_kernel_ops.layer_state import read_layer_state_definition
from irprograms import Graph, ir
from test_cpu_kernels import address
from test_options import option

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")
int64 = ctypes.c_int64


class Tokens(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("strides", int64 * 4)]


class GatedRecurrence(ctypes.Structure):
    _fields_ = [
        *((name, Tokens) for name in ("query", "key", "value", "decay", "beta")),
        ("decays_by_channel", ctypes.c_bool),
        *((name, int64) for name in ("batch", "heads", "groups", "tokens", "size", "columns")),
        ("state", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("is_transposed", ctypes.c_bool),
        ("y", ctypes.c_void_p),
    ]


class SelectiveScan(ctypes.Structure):
    _fields_ = [
        *((name, Tokens) for name in ("x", "step", "key", "query")),
        ("rates", ctypes.c_void_p),
        *((name, int64) for name in ("batch", "tokens", "channels", "size")),
        ("state", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
    ]


def tokens(x):
    strides = (*x.stride(), 0) if x.dim() == 3 else x.stride()
    return Tokens(address(x), (int64 * 4)(*strides))


def recur(library, query, key, value, decay, beta, state, transposed=False):
    """Return the outputs [B, H, S, V] and the new state of the kernel."""
    batch, heads, length, columns = value.shape
    state = (state.mT if transposed else state).contiguous()
    new, y = torch.full_like(state, torch.nan), torch.full((batch, length, heads, columns), torch.nan)
    task = GatedRecurrence(
        tokens(query),
        tokens(key),
        tokens(value),
        tokens(decay),
        Tokens() if beta is None else tokens(beta),
        decay.dim() == 4,
        batch,
        heads,
        query.shape[1],
        length,
        query.shape[3],
        columns,
        address(state),
        address(new),
        transposed,
        address(y),
    )
    library.gated_recurrence(ctypes.byref(task))
    return y.transpose(1, 2), new.mT if transposed else new


def scan(library, x, step, key, query, rates, state):
    new, y = torch.full_like(state, torch.nan), torch.full_like(x.contiguous(), torch.nan)
    heads = [tokens(t.unsqueeze(1)) for t in (x, step, key, query)]
    task = SelectiveScan(*heads, address(rates), *x.shape, rates.shape[1], address(state), address(new), address(y))
    library.selective_scan(ctypes.byref(task))
    return y, new


def randn(generator, *shape):
    """A random tensor whose memory has the axes 1 and 2 exchanged, as in the layers of a model."""
    return torch.randn(shape[0], shape[2], shape[1], *shape[3:], generator=generator).transpose(1, 2)


def gated_inputs(batch, heads, groups, length, size, columns, by_channel=False, has_beta=True):
    g = torch.Generator().manual_seed(size + columns)
    query, key = (randn(g, batch, groups, length, size) for _ in range(2))
    decay = -torch.rand(batch, heads, length, *([size] if by_channel else []), generator=g)
    decay[:, :, length // 2] = -200.0  # forgets the state
    beta = torch.rand(batch, length, heads, generator=g).mT if has_beta else None
    key = key / key.norm(dim=-1, keepdim=True)
    value = randn(g, batch, heads, length, columns)
    return query, key, value, decay, beta, torch.randn(batch, heads, size, columns, generator=g)


def expected_gated(query, key, value, decay, beta, state):
    """The same, in float64."""
    query, key, value, decay, state = (x.double() for x in (query, key, value, decay, state))
    heads = value.shape[1]
    query, key = (x.repeat_interleave(heads // x.shape[1], 1) for x in (query, key))
    out = []
    for t in range(value.shape[2]):
        state = state * decay[:, :, t].exp().reshape(*decay.shape[:2], -1, 1)
        error = value[:, :, t]
        if beta is not None:
            error = beta[:, :, t, None].double() * (error - torch.einsum("bhk,bhkv->bhv", key[:, :, t], state))
        state = state + key[:, :, t, :, None] * error[:, :, None]
        out.append(torch.einsum("bhk,bhkv->bhv", query[:, :, t], state))
    return torch.stack(out, 2), state


def scan_inputs(batch, length, channels, size):
    g = torch.Generator().manual_seed(size)
    x, step = (randn(g, batch, length, channels) for _ in range(2))
    key, query = (torch.randn(batch, length, size, generator=g) for _ in range(2))
    rates, state = -torch.rand(channels, size, generator=g), torch.randn(batch, channels, size, generator=g)
    return x, step.abs(), key, query, rates, state


def expected_scan(x, step, key, query, rates, state):
    x, step, key, query, rates, state = (t.double() for t in (x, step, key, query, rates, state))
    out = []
    for t in range(x.shape[1]):
        added = (step[:, t] * x[:, t])[..., None] * key[:, t, None]
        state = state * torch.exp(step[:, t, :, None] * rates) + added
        out.append(torch.einsum("bdn,bn->bd", state, query[:, t]))
    return torch.stack(out, 1), state


def assert_close(results, expected):
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), value, rtol=1e-4, atol=1e-4 * float(value.abs().max()))


# batch, heads, groups, tokens, size, columns
SHAPES = [(1, 1, 1, 1, 1, 1), (2, 4, 2, 5, 7, 3), (1, 2, 2, 9, 16, 40), (1, 2, 1, 33, 48, 150), (2, 2, 2, 1, 128, 128)]
RULES = {
    "linear": dict(has_beta=False),
    "linear, by channel": dict(has_beta=False, by_channel=True),
    "delta": {},
    "delta, by channel": dict(by_channel=True),
}


@linux_only
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gated_recurrence(library, rule, shape):
    inputs = gated_inputs(*shape, **rule)
    results = recur(library, *inputs)
    assert_close(results, expected_gated(*inputs))
    if shape[4] % 16 == 0:
        for result, transposed in zip(results, recur(library, *inputs, transposed=True), strict=True):
            assert transposed.equal(result)
    # Elements of a vector that do not follow each other in memory.
    apart = [x if x is None else x.repeat_interleave(2, -1)[..., ::2] for x in inputs[:4]]
    for result, other in zip(results, recur(library, *apart, *inputs[4:]), strict=True):
        assert other.equal(result)


@linux_only
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1), (2, 5, 3, 5), (1, 9, 40, 16), (2, 3, 33, 20), (1, 4, 16, 128)], ids=str
)
def test_selective_scan(library, shape):
    inputs = scan_inputs(*shape)
    assert_close(scan(library, *inputs), expected_scan(*inputs))


@linux_only
@pytest.mark.parametrize("size", [5, 16, 20])
def test_selective_scan_of_an_infinite_input(library, size):
    """The outputs of its channel are infinite, and not NaN, whatever the size of the state is."""
    inputs = [t.abs() for t in scan_inputs(1, 6, 3, size)]
    inputs[0][0, 2, 1] = torch.inf
    for result, value in zip(scan(library, *inputs), expected_scan(*inputs), strict=True):
        assert value.isinf().any() and not value.isnan().any()
        torch.testing.assert_close(result.double(), value, rtol=1e-4, atol=1e-4)


def in_parts(run, inputs, state, axis, lengths, total):
    """Return the outputs and the last state of successive calls, whose numbers of tokens are `lengths`, repeated."""
    outputs, at, i = [], 0, 0
    while at < total:
        last = min(total, at + lengths[i % len(lengths)])
        part = [x if x is None or x.dim() < 3 else x.narrow(axis, at, last - at) for x in inputs]
        out, state = run(*part, state)
        outputs.append(out)
        at, i = last, i + 1
    return torch.cat(outputs, axis), state


PARTS = [[1], [2], [3, 1, 7], [16, 1], [64]]


def check_parts_and_rows(run, tensors, fixed, state, axis, length):
    """Compare a call of `run` for all tokens and rows with calls for parts of the tokens, and for single rows.

    `tensors` may contain None. `fixed` are the operands that are the same for all tokens and rows.
    """
    out, last = run(*tensors, *fixed, state)
    assert len(out.unique()) > length
    for lengths in PARTS:
        part, part_last = in_parts(run, [*tensors, *fixed], state, axis, lengths, length)
        assert part.equal(out) and part_last.equal(last), lengths
    for row in range(len(state)):
        part = [x if x is None else x[row : row + 1] for x in tensors]
        alone, alone_last = run(*part, *fixed, state[row : row + 1].contiguous())
        assert alone.equal(out[row : row + 1]) and alone_last.equal(last[row : row + 1])


@linux_only
@pytest.mark.parametrize("columns", [5, 33, 128, 150])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_parts_and_rows_do_not_change_the_bits_of_a_gated_recurrence(library, rule, columns):
    length = 70
    *inputs, state = gated_inputs(3, 2, 1, length, 32, columns, **rule)
    check_parts_and_rows(partial(recur, library), inputs, [], state, 2, length)


@linux_only
@pytest.mark.parametrize("channels, size", [(5, 16), (40, 5), (33, 128)])
def test_parts_and_rows_do_not_change_the_bits_of_a_selective_scan(library, channels, size):
    length = 70
    *tensors, rates, state = scan_inputs(3, length, channels, size)
    check_parts_and_rows(partial(scan, library), tensors, [rates], state, 1, length)


PRINT_RESULTS = """
import sys
sys.path[:0] = sys.argv[2:]
from kernel_library import kernel_library
from test_token_recurrences import gated_inputs, recur, scan, scan_inputs
library = kernel_library(sys.argv[1])
for result in (*recur(library, *gated_inputs(2, 8, 4, 40, 64, 64)), *scan(library, *scan_inputs(2, 40, 64, 16))):
    print(result.contiguous().numpy().tobytes().hex())
"""


@linux_only
def test_the_number_of_threads_does_not_matter(delegate):
    folder = Path(__file__).parent
    command = [sys.executable, "-c", PRINT_RESULTS, delegate, folder, folder.parent]
    outputs = {
        subprocess.run(
            command, env=os.environ | {"OPENBLAS_NUM_THREADS": n}, capture_output=True, check=True, timeout=100
        ).stdout
        for n in ("1", "3")
    }
    assert len(outputs) == 1


# The nodes ----------------------------------------------------------------------------------------


def gated_program(inputs, **shapes):
    g = Graph()
    names = ("query", "key", "value", "decay", "beta", "state")
    slots = {name: g.input(shapes.get(name, x.shape)) for name, x in zip(names, inputs) if x is not None}
    value, state = inputs[2], inputs[5]
    g.emit(ir.GatedRecurrenceNode(**slots, out=g.output(value.shape), out_state=g.output(state.shape)))
    return g


@linux_only
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated_recurrence_node(shape, rule):
    inputs = [x if x is None else x.contiguous() for x in gated_inputs(*shape, **rule)]
    given = [x for x in inputs if x is not None]
    assert_close(gated_program(inputs).run(*given), expected_gated(*inputs))


def scan_program(inputs):
    g = Graph()
    names = ("x", "step", "key", "query", "rates", "state")
    slots = {name: g.input(x.shape) for name, x in zip(names, inputs)}
    g.emit(ir.SelectiveScanNode(**slots, out=g.output(inputs[0].shape), out_state=g.output(inputs[5].shape)))
    return g


@linux_only
def test_selective_scan_node():
    inputs = [x.contiguous() for x in scan_inputs(2, 5, 7, 16)]
    assert_close(scan_program(inputs).run(*inputs), expected_scan(*inputs))


@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 0, 4, 3), (2, 2, 2, 3, 0, 5), (1, 1, 1, 2, 3, 0), (0, 2, 1, 3, 4, 5)], ids=str
)
def test_gated_recurrence_of_nothing(shape):
    """Without tokens, the state stays. A key or a value without elements gives outputs of zeros."""
    batch, heads, groups, length, size, columns = shape
    inputs = [
        torch.ones(batch, groups, length, size),
        torch.ones(batch, groups, length, size),
        torch.ones(batch, heads, length, columns),
        torch.ones(batch, heads, length),
        torch.ones(batch, heads, length),
        torch.full((batch, heads, size, columns), 2.0),
    ]
    out, state = gated_program(inputs).run(*inputs)
    assert out.equal(torch.zeros(batch, heads, length, columns)) and state.equal(inputs[5])


@pytest.mark.parametrize("shape", [(1, 0, 3, 4), (2, 3, 0, 4), (1, 2, 3, 0)], ids=str)
def test_selective_scan_of_nothing(shape):
    batch, length, channels, size = shape
    inputs = [
        torch.ones(batch, length, channels),
        torch.ones(batch, length, channels),
        torch.ones(batch, length, size),
        torch.ones(batch, length, size),
        torch.ones(channels, size),
        torch.full((batch, channels, size), 2.0),
    ]
    out, state = scan_program(inputs).run(*inputs)
    assert out.equal(torch.zeros(batch, length, channels)) and state.equal(inputs[5])


WRONG = {
    "query": ((1, 2, 3, 4), (1, 3, 3, 4), "value: got 4 heads, expected a multiple of the 3 of the query"),
    "key": ((1, 2, 3, 4), (1, 2, 3, 5), "key: got float32[1,2,3,5], expected float32[1,2,3,4]"),
    "decay": ((1, 4, 3), (1, 4, 2), "decay: got float32[1,4,2], expected float32[1,4,3]"),
    "state": ((1, 4, 4, 5), (1, 4, 5, 4), "state: got float32[1,4,5,4], expected float32[1,4,4,5]"),
    "value": ((1, 4, 3, 5), (4, 3, 5), "value float32[4,3,5] and decay"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_are_refused(name, capfd):
    names = ("query", "key", "value", "decay", "beta", "state")
    inputs = [x.contiguous() for x in gated_inputs(1, 4, 2, 3, 4, 5)]
    right, wrong, message = WRONG[name]
    assert inputs[names.index(name)].shape == right
    program = gated_program(inputs, **{name: wrong})
    inputs[names.index(name)] = torch.zeros(wrong)
    with pytest.raises(RuntimeError):
        program.run(*inputs)
    assert message in capfd.readouterr().err


@linux_only
def test_max_operations(capfd):
    inputs = [x.contiguous() for x in gated_inputs(1, 4, 2, 3, 4, 5)]
    operations = 3 * 3 * inputs[5].numel()  # for each token, the state is read twice and written once
    with option("max_operations", str(operations)), pytest.raises(RuntimeError):
        gated_program(inputs).run(*inputs)
    assert f"more than {operations} operations in one call" in capfd.readouterr().err
    with option("max_operations", str(2 * operations)):
        gated_program(inputs).run(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_read_layer_state_node(dtype):
    states = (torch.arange(3 * 7).reshape(1, 1, 3, 7) + 1).to(dtype)
    start, row = torch.tensor([4, 0, 1, 9]), torch.tensor([2, 1, 2, 0])
    g = Graph()
    held = g.buffer(states.shape, dtype, initial=states)
    starts, rows = g.input((4,), torch.int64), g.input((4,), torch.int64)
    g.emit(ir.ReadLayerStateNode(states=held, start=starts, row=rows, out=g.output((4, 7), dtype)))
    assert g.run(start, row)[0].equal(read_layer_state_definition(states, start, row, 3))


def test_a_row_out_of_range_is_refused(capfd):
    g = Graph()
    states, start, row = g.input((1, 1, 3, 7)), g.input((1,), torch.int64), g.input((1,), torch.int64)
    g.emit(ir.ReadLayerStateNode(states=states, start=start, row=row, out=g.output((1, 7))))
    run = g.load()
    for wrong in (-1, 3):
        with pytest.raises(RuntimeError):
            run(torch.zeros(1, 1, 3, 7), torch.ones(1, dtype=torch.int64), torch.tensor([wrong]))
        assert f"row: got {wrong}, expected rows in [0, 3)" in capfd.readouterr().err
