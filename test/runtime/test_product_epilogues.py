"""A product and the activation or sum after it, which the CPU computes together: the results keep their bits.

A profiled call runs each instruction by itself. Without an array for the product, a call needs less memory.
"""

import ctypes
import sys

import numpy as np
import pytest
import torch
from executorch_mlx.memory import get_active_memory, get_peak_memory, reset_peak_memory
from irprograms import Graph, ir
from product_arguments import GELU, Epilogue, Matmul
from test_cpu_kernels import address
from test_product_groups import assert_same_bits, profiled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the CPU kernels are built on Linux only")

K, N = 64, 300


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Program(Graph):
    """y = epilogue(x @ w.T + bias) for x [rows, K] and w [N, K]. Each epilogue emits its instructions."""

    def __init__(self, rows: int, has_bias=True):
        super().__init__()
        self.rows = rows
        self.x = self.input((rows, K))
        self.residual = self.input((rows, N))
        self.product, self.y = self.new_temp(), self.output((rows, N))
        self.zero = self.constant(torch.zeros(()))
        self.multiply(self.x, self.product, has_bias)

    def multiply(self, x, out, has_bias=True, seed=1):
        bias = self.constant(random(N, seed=2)) if has_bias else None
        self.emit(
            ir.TransposeNode(x=self.constant(random(N, K, seed=seed)), perm=[1, 0], out=(t := self.new_temp())),
            ir.AddmmNode(mat1=x, mat2=t, bias=bias, out=out),
        )

    def arguments(self):
        return random(self.rows, K, seed=3), random(self.rows, N, seed=4)


EPILOGUES = {
    "gelu": lambda g: ir.GeluNode(x=g.product, approximate="none", out=g.y),
    "gelu_tanh": lambda g: ir.GeluNode(x=g.product, approximate="tanh", out=g.y),
    "silu": lambda g: ir.SiluNode(x=g.product, out=g.y),
    "relu": lambda g: ir.MaximumNode(a=g.product, b=g.zero, out=g.y),
    "relu of the second operand": lambda g: ir.MaximumNode(a=g.zero, b=g.product, out=g.y),
    "residual": lambda g: ir.AddNode(a=g.product, b=g.residual, out=g.y),
    "residual first": lambda g: ir.AddNode(a=g.residual, b=g.product, out=g.y),
}


def peak_of_call(model, *data) -> int:
    """The bytes that a call needs beside what is in use before."""
    model(*data)
    before = get_active_memory()
    reset_peak_memory()
    model(*data)
    return get_peak_memory() - before


@pytest.mark.parametrize("rows", [1, 7, 150])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_results_keep_their_bits(epilogue, has_bias, rows):
    g = Program(rows, has_bias)
    g.emit(EPILOGUES[epilogue](g))
    data = g.arguments()
    assert_same_bits(g.run(*data), profiled(g, *data))


@pytest.mark.parametrize("epilogue", ["gelu", "gelu_tanh", "silu", "residual", "residual first"])
def test_the_product_has_no_array(epilogue):
    """ReLU has none anyway: by itself, MLX computes it in place."""
    peaks = []
    for node in (EPILOGUES[epilogue], EPILOGUES[epilogue]):
        g = Program(2000)
        if len(peaks) == 1:
            g.emit(ir.IdCopyNode(x=g.x, out=g.new_temp()))  # between the product and what follows it
        g.emit(node(g))
        peaks.append(peak_of_call(g.load(), *g.arguments()))
    assert peaks[0] + 2000 * N * 4 <= peaks[1] + 4096


def another_reader(g):
    g.emit(EPILOGUES["gelu"](g), ir.NegNode(x=g.product, out=g.output((g.rows, N))))


def the_product_is_an_output(g):
    g.multiply(g.x, out := g.output((g.rows, N)), seed=5)
    g.emit(ir.SiluNode(x=out, out=g.y))


def both_operands_are_the_product(g):
    g.emit(ir.AddNode(a=g.product, b=g.product, out=g.y))


def a_row_is_added(g):
    g.emit(ir.AddNode(a=g.product, b=g.constant(random(N, seed=6)), out=g.y))


def more_rows_are_added(g):
    more = g.constant(random(2, g.rows, N, seed=6))
    g.emit(ir.AddNode(a=g.product, b=more, out=(t := g.new_temp())), ir.SumNode(x=t, axes=[0], out=g.y))


def maximum_with_one(g):
    g.emit(ir.MaximumNode(a=g.product, b=g.constant(torch.ones(())), out=g.y))


def maximum_with_a_row_of_zeros(g):
    g.emit(ir.MaximumNode(a=g.product, b=g.constant(torch.zeros(N)), out=g.y))


def another_product_of_the_operand(g):
    g.emit(EPILOGUES["silu"](g))
    g.multiply(g.x, g.output((g.rows, N)), seed=7)


def a_group_of_elementwise_operations(g):
    g.emit(ir.SiluNode(x=g.product, out=(t := g.new_temp())), ir.MultiplyNode(a=t, b=g.residual, out=g.y))


def another_value_in_the_slot(g):
    g.emit(ir.NegNode(x=g.residual, out=g.product), EPILOGUES["gelu"](g))


NEAR_MISSES = [
    another_reader,
    the_product_is_an_output,
    both_operands_are_the_product,
    a_row_is_added,
    more_rows_are_added,
    maximum_with_one,
    maximum_with_a_row_of_zeros,
    another_product_of_the_operand,
    a_group_of_elementwise_operations,
    another_value_in_the_slot,
]


@pytest.mark.parametrize("near_miss", NEAR_MISSES, ids=lambda f: f.__name__)
def test_near_misses(near_miss):
    g = Program(5)
    near_miss(g)
    data = g.arguments()
    assert_same_bits(g.run(*data), profiled(g, *data))


def test_a_residual_that_is_the_slot_of_the_result():
    """The sum replaces the residual, as in a stack of layers."""
    g = Program(5)
    g.emit(ir.NegNode(x=g.residual, out=(total := g.new_temp())), ir.NegNode(x=g.x, out=(x := g.new_temp())))
    for seed in (8, 9):
        g.multiply(x, g.product, seed=seed)
        g.emit(ir.AddNode(a=g.product, b=total, out=total))
    g.emit(ir.NegNode(x=total, out=g.y))
    data = g.arguments()
    assert_same_bits(g.run(*data), profiled(g, *data))


def test_an_invalid_residual_is_an_error_of_its_own_instruction(capfd):
    g = Program(5)
    g.emit(ir.AddNode(a=g.product, b=g.constant(random(3, 7)), out=g.y))
    with pytest.raises(RuntimeError):
        g.run(*g.arguments())
    assert "(AddNode)" in capfd.readouterr().err


@pytest.mark.parametrize("m", [1, 3, 8, 9, 40])
@pytest.mark.parametrize("k, n", [(300, 131), (20, 5)])
def test_kernel(library, m, k, n):
    """GELU of a product, plus a residual: the bits of the three operations one by one."""
    x, w, bias, residual = (random(*shape, seed=i) for i, shape in enumerate([(m, k), (n, k), (n,), (m, n)]))
    plain, y = torch.empty(m, n), torch.empty(m, n)
    arguments = (x.data_ptr(), w.data_ptr(), 1, k, bias.data_ptr(), 0, m, n, k, 1, 1)
    library.matmuls(ctypes.byref(Matmul(*arguments, plain.data_ptr(), None)), 1)
    library.unary(GELU, address(plain), 0, address(plain), ctypes.c_int64(plain.numel()))
    epilogue = Epilogue(GELU, residual.data_ptr())
    library.matmuls(ctypes.byref(Matmul(*arguments, y.data_ptr(), None, ctypes.addressof(epilogue))), 1)
    np.testing.assert_array_equal(y.numpy().view(np.int32), (plain + residual).numpy().view(np.int32))
