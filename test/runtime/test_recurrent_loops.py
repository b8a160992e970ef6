"""Recurrent loops, which a CPU kernel runs in one call: the results keep their bits.

A profiled call runs each instruction by itself, so that it shows what the results are without the kernel.
"""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from irprograms import Graph, ir, lit, lits
from irprograms.options import option
from kernel_library import kernel_library
from test_profile import run_plain, run_profiled
from torch import nn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel is built on Linux only")

STEPS = 7
WIDE = 200  # units: several threads share the time steps of any layer of this width


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def export(layer, x):
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    exported = torch.export.export(layer.eval(), (x,))
    return to_edge_transform_and_lower(exported, partitioner=[MLXPartitioner()]).to_executorch().buffer


@pytest.fixture
def calls(delegate):
    """A function that returns the number of calls of kernels for single products so far."""
    count = kernel_library(delegate).product_calls
    count.restype = ctypes.c_uint64
    return count


def assert_same_as_instructions(pte, inputs, folder):
    plain, profiled = run_plain(pte, [inputs])[0], run_profiled(pte, [inputs], folder)[0][0]
    assert sum(len(y.unique()) for y in plain) > len(plain)
    for y, expected in zip(plain, profiled, strict=True):
        assert expected.isfinite().all() and torch.equal(y, expected)


LAYERS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
    "lstm without biases": lambda *args, **kwargs: nn.LSTM(*args, bias=False, **kwargs),
    "gru without biases": lambda *args, **kwargs: nn.GRU(*args, bias=False, **kwargs),
}


@pytest.mark.parametrize("units, rows", [(1, 3), (4, 1), (50, 9), (WIDE, 1), (WIDE, 8)])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, units, rows, delegate, tmp_path):
    x = random(STEPS, rows, 5)
    assert_same_as_instructions(export(LAYERS[name](5, units), x), [x], tmp_path)


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_all_time_steps_run_in_one_call(name, calls):
    x = random(2, STEPS, 6)
    pte = export(LAYERS[name](6, 40, 2, bidirectional=True, batch_first=True), x)
    before = calls()
    run_plain(pte, [[x]])
    # The layers and directions: one product of the inputs each.
    assert calls() - before == 4


def test_directions_and_batch_first(delegate, tmp_path):
    x = random(3, STEPS, 6)
    assert_same_as_instructions(export(nn.GRU(6, 33, 2, bidirectional=True, batch_first=True), x), [x], tmp_path)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_rows_do_not_depend_on_each_other(name, delegate):
    x = random(STEPS, 11, 5)
    together = run_plain(export(LAYERS[name](5, WIDE), x), [[x]])[0][0]
    alone = [
        run_plain(export(LAYERS[name](5, WIDE), row), [[row]])[0][0]
        for row in map(torch.Tensor.contiguous, x.split(1, dim=1))
    ]
    assert torch.equal(together, torch.cat(alone, dim=1))


PRINT_OUTPUT = """
import hashlib, sys, torch
from executorch_mlx import Runtime
x = torch.randn(40, 3, 5, generator=torch.Generator().manual_seed(0))
program = Runtime.get().load_program(open(sys.argv[1], "rb").read())  # which the method does not keep
method = program.load_method("forward")
print(hashlib.sha256(b"".join(y.numpy().tobytes() for _ in range(9) for y in method.execute([x]))).hexdigest())
"""


@pytest.mark.parametrize("name", ["lstm", "rnn"])
def test_number_of_threads_does_not_matter(name, delegate, tmp_path):
    """With more threads than processors, threads are interrupted while others wait for them."""
    path = tmp_path / "layer.pte"
    path.write_bytes(export(LAYERS[name](5, WIDE), random(40, 3, 5)))
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PRINT_OUTPUT, path],
            env=os.environ | {"OMP_NUM_THREADS": n},
            capture_output=True,
            check=True,
            timeout=100,
        ).stdout
        for n in ("1", "2", "3", "5")
    }
    assert len(outputs) == 1 and len(outputs.pop()) == 65


# -- programs by hand ---------------------------------------------------------------


class Loop(Graph):
    """A loop over x [STEPS, rows, 4] with a carry, its initial state [rows, 4], and a product by a constant."""

    def __init__(self, rows=2):
        super().__init__()
        self.rows = rows
        self.x, self.state = self.input((STEPS, rows, 4)), self.input((rows, 4))
        self.part, self.carry, self.product = self.new_temp(), self.new_temp(), self.new_temp()
        self.matrix = self.constant(random(4, 4, seed=1))

    def scan(self, *body, outputs=(), carry=()):
        """Emit the loop. `body` comes after the product."""
        product = ir.AddmmNode(mat1=self.carry, mat2=self.matrix, bias=self.part, out=self.product)
        self.emit(
            ir.IdCopyNode(x=self.state, out=self.carry),
            ir.ScanNode(
                originals=[self.x],
                sliced=[self.part],
                outputs=list(outputs),
                carry=[self.carry, *carry],
                body_chain_idx=self.chain(product, *body),
                scan_axis=0,
            ),
        )

    def result(self, slot, *shape):
        self.emit(ir.IdCopyNode(x=slot, out=self.output(shape or (self.rows, 4))))

    def arguments(self):
        return [random(STEPS, self.rows, 4), random(self.rows, 4, seed=2)]


def test_slots_that_the_last_time_step_leaves(calls, tmp_path):
    """Instructions after the loop read what its body wrote or read last."""
    g = Loop()
    stacked, y = g.new_temp(), g.new_temp()
    g.scan(
        ir.TanhNode(x=g.product, out=y),
        ir.MultiplyNode(a=y, b=g.part, out=g.carry),
        ir.IdCopyNode(x=y, out=stacked),
        outputs=[stacked],
    )
    for slot in (g.carry, g.product, g.part):
        g.result(slot)
    g.result(stacked, STEPS, 2, 4)
    before = calls()
    assert_same_as_instructions(g.pte(), g.arguments(), tmp_path)
    assert calls() - before == STEPS  # those of the profiled call


@pytest.mark.parametrize("number", [torch.tensor(0.25), torch.tensor([0.25]), random(4, seed=3), random(2, 4, seed=3)])
def test_operands_that_all_time_steps_share(number, calls, tmp_path):
    g = Loop()
    y = g.new_temp()
    constant = g.constant(number)
    g.scan(ir.MultiplyNode(a=g.product, b=constant, out=y), ir.SigmoidNode(x=y, out=g.carry))
    g.result(g.carry)
    before = calls()
    assert_same_as_instructions(g.pte(), g.arguments(), tmp_path)
    assert calls() - before == STEPS


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("shape", [(), (1,), (4,), (1, 4)])
def test_values_that_depend_on_no_row(rows, shape, delegate, tmp_path):
    """A step over operands that all time steps and rows share has a result with fewer rows or axes than the state."""
    g = Loop(rows)
    shared, y = g.new_temp(), g.new_temp()
    g.scan(
        ir.SigmoidNode(x=g.constant(random(*shape, seed=3)), out=shared),
        ir.MultiplyNode(a=g.product, b=shared, out=y),
        ir.TanhNode(x=y, out=g.carry),
    )
    g.result(g.carry)
    assert_same_as_instructions(g.pte(), g.arguments(), tmp_path)


def test_numbers_with_more_axes_than_the_state(delegate, tmp_path):
    g = Loop()
    y = g.new_temp()
    g.scan(
        ir.TanhNode(x=g.product, out=g.carry),
        ir.MultiplyNode(a=g.product, b=g.constant(random(1, 1, 1, seed=3)), out=y),
        outputs=[y],
    )
    g.result(y, STEPS, 1, 2, 4)
    assert_same_as_instructions(g.pte(), g.arguments(), tmp_path)


def test_slices_without_elements(delegate, capfd):
    g = Loop()
    empty, part, y = g.input((STEPS, 2, 0)), g.new_temp(), g.new_temp()
    g.scan(ir.MultiplyNode(a=g.product, b=part, out=y), ir.TanhNode(x=y, out=g.carry))
    loop = g.chains[0][-1]
    loop.originals.append(empty)
    loop.sliced.append(part)
    g.result(g.carry)
    with pytest.raises(RuntimeError):
        g.run(*g.arguments(), torch.zeros(STEPS, 2, 0))
    assert "(2,4) and (2,0) cannot be broadcast" in capfd.readouterr().err


def test_outputs_along_the_last_axis(delegate, tmp_path):
    """Only the number of time steps is read from the slices."""
    g = Loop()
    y = g.new_temp()
    body = [
        ir.AddmmNode(mat1=g.carry, mat2=g.matrix, out=g.product),
        ir.TanhNode(x=g.product, out=y),
        ir.SigmoidNode(x=y, out=g.carry),
    ]
    g.emit(
        ir.IdCopyNode(x=g.state, out=g.carry),
        ir.ScanNode(
            originals=[g.x], sliced=[g.part], outputs=[y], carry=[g.carry], body_chain_idx=g.chain(*body), scan_axis=2
        ),
    )
    g.result(y, 2, 4, 4)
    assert_same_as_instructions(g.pte(), g.arguments(), tmp_path)


def test_carries_that_change_places(delegate, tmp_path):
    """A carry that is a copy of another one is not for the kernel, which would overwrite it too early."""
    g = Loop()
    other = g.new_temp()
    g.emit(ir.IdCopyNode(x=g.state, out=other))
    y = g.new_temp()
    whole = {"axis": lit(-1), "start": lit(0), "stop": lit(4)}
    g.scan(
        ir.TanhNode(x=g.product, out=y),
        ir.SliceNode(x=g.carry, out=other, **whole),
        ir.MultiplyNode(a=y, b=other, out=g.carry),
        carry=[other],
    )
    g.result(g.carry)
    g.result(other)
    assert_same_as_instructions(g.pte(), g.arguments(), tmp_path)


def test_columns_that_are_no_whole_gates(delegate, tmp_path):
    g = Loop()
    parts = [g.new_temp() for _ in range(2)]
    g.matrix = g.constant(random(4, 8, seed=1))
    g.x = g.input((STEPS, 2, 8))
    half = g.new_temp()
    g.scan(
        ir.SliceNode(x=g.product, out=half, axis=lit(-1), start=lit(2), stop=lit(6)),
        ir.SplitNode(x=g.product, outs=parts, sizes=lits(4), axis=-1),
        ir.MultiplyNode(a=half, b=parts[1], out=half),
        ir.TanhNode(x=half, out=g.carry),
    )
    g.result(g.carry)
    assert_same_as_instructions(g.pte(), [*g.arguments(), random(STEPS, 2, 8)], tmp_path)


@pytest.mark.parametrize(
    "limit, message",
    [
        (("max_instructions", "20"), "more than 20 instructions in one call"),
        (("max_operations", "800"), "more than 800 operations in one call"),
    ],
)
def test_limits_of_a_call(delegate, limit, message, capfd):
    g = Loop()
    g.scan(ir.TanhNode(x=g.product, out=(y := g.new_temp())), ir.MultiplyNode(a=y, b=g.part, out=g.carry))
    g.result(g.carry)
    with option(*limit):
        with pytest.raises(RuntimeError):
            g.run(*g.arguments())
    assert message in capfd.readouterr().err
