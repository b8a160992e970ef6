"""Products of activations as integers with quantized weights equal the definition in simd/integers.h, bit for bit."""

import ctypes
import sys

import numpy as np
import pytest
import torch
from executorch_mlx.custom_kernel_ops.int8_activations import rounded_to_int8
from executorch_mlx.custom_ops.packing import pack
from irprograms import Graph, ir
from product_arguments import BFLOAT16, FLOAT16, FLOAT32, QuantizedMatmul
from test_cpu_kernels import HALF_TYPES, TYPES, decode, encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")


class Matrix:
    """A random matrix [n, k] in affine packing.

    `digits` is 1 for activations in 8 bits, 2 for half precision, and 3 for float32.
    """

    def __init__(self, n, k, bits=4, group_size=32, scale_type=FLOAT32, seed=0, digits=1):
        self.digits = digits
        rng = np.random.default_rng(seed)
        self.k, self.bits, self.group_size, self.scale_type = k, bits, group_size, scale_type
        self.integers = rng.integers(0, 2**bits, (n, k))
        self.w = pack(torch.from_numpy(self.integers).to(torch.uint8), bits).view(torch.int32).numpy()
        self.scales, self.biases = (
            encode(rng.standard_normal((n, k // group_size), np.float32), scale_type) for _ in range(2)
        )

    def multiply(self, library, x, x_type=FLOAT32, panels=None):
        """Return x [m, k] @ w.T, computed by the kernel. With `panels`, it gets these instead of the matrix."""
        y = np.empty((len(x), len(self.w)), x.dtype)
        matmul = self._arguments(x.ctypes.data, len(x), y.ctypes.data, x_type)
        if panels is not None:
            matmul.w = matmul.scales = matmul.biases = None
            matmul.integer_panels = panels.ctypes.data
        assert library.supports_int8(self.bits, self.group_size, self.k)
        multiply = library.int8_matmul if self.digits == 1 else library.integer_matmul
        multiply(ctypes.byref(matmul), 1)
        return y

    def multiply_as_floats(self, library, x):
        """Return x @ w.T, computed by the kernel that converts the matrix to float32."""
        y = np.empty((len(x), len(self.w)), np.float32)
        library.quantized_matmul(ctypes.byref(self._arguments(x.ctypes.data, len(x), y.ctypes.data)), 1)
        return y

    def packed(self, library):
        """Return the panels of the matrix, and a few bytes after them that must not change."""
        matmul = self._arguments()
        size = library.integer_panels_size(ctypes.byref(matmul))
        panels = np.full(size + 8, 0x5A, np.uint8)
        library.pack_integer_panels(ctypes.byref(matmul), ctypes.c_void_p(panels.ctypes.data))
        assert (panels[size:] == 0x5A).all()
        return panels

    def _arguments(self, x=None, m=0, y=None, x_type=FLOAT32):
        arrays = (a.ctypes.data for a in (self.w, self.scales, self.biases))
        sizes = (self.bits, self.group_size, m, len(self.w), self.k)
        return QuantizedMatmul(x, *arrays, self.scale_type, *sizes, y, x_type)

    @staticmethod
    def as_float32(dots):
        """The dot products of the integers, from those of their digits."""
        if len(dots) == 1:
            return dots[0].astype(np.float32)
        lower = (dots[0] + 256 * dots[1]).astype(np.float32)
        if len(dots) == 2:
            return lower
        return (dots[2].astype(np.longdouble) * 65536 + lower).astype(np.float32)

    def expected(self, x):
        """Return x @ w.T as simd/integers.h defines it. A longdouble holds a product of float32 numbers exactly."""
        groups = x.reshape(len(x), -1, self.group_size)
        largest = np.abs(groups).max(-1)
        if self.digits == 1:
            integers = np.rint(groups * (np.float32(127) / largest)[..., None]).astype(np.int64)
            scales = largest / np.float32(127)
        else:
            bits, limit = (15, 0x7F7F) if self.digits == 2 else (23, 0x7F7F7F)
            exponents = np.frexp(largest.astype(np.longdouble) * np.float32(2**bits / limit))[1] - 1
            integers = np.rint(np.ldexp(groups, bits - 1 - exponents[..., None])).astype(np.int64)
            scales = np.ldexp(np.float32(1), exponents - bits + 1)
        sums = scales * integers.sum(-1).astype(np.float32)
        w = self.integers.reshape(len(self.w), -1, self.group_size)
        dots = self.as_float32([np.einsum("mgi,ngi->gmn", d, w) for d in digits_of(integers, self.digits)])
        w_scales, w_biases = (decode(a, self.scale_type) for a in (self.scales, self.biases))
        total = np.zeros(dots.shape[1:], np.float32)
        for g, dot in enumerate(dots):
            factor = w_scales[:, g] * scales[:, g, None]
            total = (factor.astype(np.longdouble) * dot + total).astype(np.float32)
            total = (w_biases[:, g].astype(np.longdouble) * sums[:, g, None] + total).astype(np.float32)
        return total


def digits_of(integers, count):
    """Return the digits of integers in base 256, each in [-128, 127], the lowest one first."""
    digits = []
    for _ in range(count - 1):
        digits.append((integers + 128) % 256 - 128)
        integers = (integers - digits[-1]) // 256
    assert np.abs(integers).max() <= 127
    return [*digits, integers]


def activations(m, k, low=-20, high=20):
    """Normally distributed values. Each row has a factor between 2^low and 2^high."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((m, k), np.float32) * np.exp2(rng.integers(low, high, (m, 1))).astype(np.float32)


@pytest.mark.parametrize("dtype, digits", [(FLOAT32, 1), (FLOAT32, 3), (FLOAT16, 2), (BFLOAT16, 2)])
@pytest.mark.parametrize("scale_type", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_results_are_those_of_the_definition(library, bits, group_size, scale_type, dtype, digits):
    for n, groups in ((83, 9), (5, 1), (16, 36)):
        matrix = Matrix(n, groups * group_size, bits, group_size, scale_type, digits=digits)
        x = encode(activations(15, matrix.k, *(-2, 2) if dtype == FLOAT16 else (-20, 20)), dtype)
        expected = torch.from_numpy(matrix.expected(decode(x, dtype))).to(TYPES[dtype]).view(torch.int16).numpy()
        panels = matrix.packed(library)
        for m in (1, 2, 3, 4, 5, 8, 15):
            for source in (None, panels):
                y = matrix.multiply(library, x[:m].copy(), dtype, source)
                np.testing.assert_array_equal(y.view(np.int16), expected[:m])


@HALF_TYPES
@pytest.mark.parametrize("bits", [4, 8])
def test_half_activations_lose_no_precision(library, bits, dtype):
    """Before a product is rounded to half precision, its error is at most 2^-14.9 of what the largest value of its
    group would give. The test sees the rounded product, and so subtracts the error of this rounding.
    """
    matrix = Matrix(50, 8 * 64, bits, 64, digits=2)
    matrix.scales *= np.float32(2**-8)  # so that no result is infinite
    matrix.biases *= np.float32(2**-8)
    x = activations(20, matrix.k, -2, 2)
    x[:, ::97] *= 100
    x = encode(x, dtype)
    exact, magnitudes = exact_product(matrix, decode(x, dtype))
    rounding = np.abs(exact) * 2.0 ** (-11 if dtype == FLOAT16 else -8)
    errors = np.abs(decode(matrix.multiply(library, x, dtype), dtype) - exact)
    assert ((errors - rounding) / magnitudes).max() <= 2.0**-14.9


def exact_product(matrix, x):
    """Return x @ w.T in float64, and the products of the largest value of each group with the magnitudes of w."""
    size = matrix.group_size
    w = matrix.scales.repeat(size, 1).astype(np.float64) * matrix.integers
    biases = matrix.biases.repeat(size, 1).astype(np.float64)
    largest = np.abs(x).reshape(len(x), -1, size).max(-1).repeat(size, 1).astype(np.float64)
    return x.astype(np.float64) @ (w + biases).T, largest @ (np.abs(w) + np.abs(biases)).T


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_float_activations_lose_no_precision(library, bits, group_size):
    """The error of a product is at most 2^-22 of what the largest value of its group would give, also with outliers."""
    matrix = Matrix(50, 8 * group_size, bits, group_size, digits=3)
    x = activations(20, matrix.k)
    x[:, ::97] *= 300
    exact, magnitudes = exact_product(matrix, x)
    assert (np.abs(matrix.multiply(library, x) - exact) / magnitudes).max() <= 2.0**-22


@pytest.mark.parametrize("largest", [1.0, 127.0, np.float32(0x7F7F7F) / 2**22, np.nextafter(np.float32(2), 0), 3.4e38])
def test_largest_values_of_a_group(library, largest):
    matrix = Matrix(20, 64, digits=3)
    matrix.scales *= np.float32(1e-6)
    matrix.biases *= np.float32(1e-6)
    x = activations(2, 64)
    x[:, 5] = largest
    x[1, 40] = -largest
    np.testing.assert_array_equal(matrix.multiply(library, x), matrix.expected(x))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e-31, -1e-45])
@pytest.mark.parametrize("m", [1, 7, 70])
def test_float_rows_that_integers_cannot_represent(library, m, value):
    """They are multiplied in float32, and the other rows as always."""
    matrix = Matrix(40, 512, digits=3)
    x = activations(m, matrix.k)
    expected = matrix.multiply(library, x)
    x[-1, 96:128] = value
    expected[-1] = matrix.multiply_as_floats(library, x[-1:].copy())
    np.testing.assert_array_equal(matrix.multiply(library, x), expected)
    x[-1, 96:128] = 0
    assert np.isfinite(matrix.multiply(library, x)).all()


def test_half_activations_are_converted_and_results_rounded(library):
    matrix = Matrix(40, 256)
    x = encode(activations(3, matrix.k), BFLOAT16)
    expected = torch.from_numpy(matrix.multiply(library, decode(x, BFLOAT16))).to(torch.bfloat16)
    y = matrix.multiply(library, x, BFLOAT16)
    assert torch.equal(torch.from_numpy(y.view(np.int16)), expected.view(torch.int16))


def test_activations_are_rounded_as_in_torch(library):
    """With the identity as matrix, the results are the rounded activations. Some lie halfway between two integers."""
    matrix = Matrix(32, 32, bits=8)
    matrix.w[:] = pack(torch.eye(32, dtype=torch.uint8), 8).view(torch.int32).numpy()
    matrix.scales[:], matrix.biases[:] = 1, 0
    halves = np.arange(32, dtype=np.float32)[None] + 0.5
    halves[0, 31] = 127  # the largest of the group, so that the scale is 1
    x = np.concatenate([activations(20, 32), halves, -halves, halves / 1024])
    np.testing.assert_array_equal(matrix.multiply(library, x), rounded_to_int8(torch.from_numpy(x), 32).numpy())


@pytest.mark.parametrize("m", [1, 7])
def test_groups_with_infinity_nan_or_tiny_values(library, m):
    """Infinity and NaN spread to the results of their row. A group of tiny values counts as zeros."""
    matrix = Matrix(20, 512)
    x = activations(m, matrix.k)
    for value in (np.inf, -np.inf, np.nan):
        changed = x.copy()
        changed[0, 100] = value
        y = matrix.multiply(library, changed)
        assert np.isnan(y[0]).all() and np.array_equal(y[1:], matrix.multiply(library, x)[1:])
    tiny, zero = x.copy(), x.copy()
    tiny[:, 64:96], zero[:, 64:96] = 1e-31, 0
    tiny[0, 70] = -1e-45
    y = matrix.multiply(library, tiny)
    assert np.isfinite(y).all() and np.array_equal(y, matrix.multiply(library, zero))
    assert np.array_equal(matrix.multiply(library, np.zeros_like(x)), np.zeros((m, 20), np.float32))


@pytest.mark.parametrize("bits", [2, 4])
def test_int8_quantized_matmul_node(bits):
    """A matrix of 2 bits has no kernel: the node rounds the activations, and MLX multiplies."""
    matrix, x = Matrix(20, 128, bits), torch.from_numpy(activations(3, 128))
    g = Graph()
    factors = {n: g.constant(torch.from_numpy(getattr(matrix, n))) for n in ("scales", "biases")}
    w = g.constant(torch.from_numpy(matrix.w).view(torch.uint32))
    sizes = {"group_size": 32, "bits": bits}
    for shape in ((3, 128), (128,), (0, 128)):
        g.emit(ir.Int8QuantizedMatmulNode(x=g.input(shape), w=w, out=g.output((*shape[:-1], 20)), **factors, **sizes))
    results = g.run(x, x[1], x[:0])
    expected = torch.from_numpy(matrix.expected(x.numpy()))
    torch.testing.assert_close(results[0], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    torch.testing.assert_close(results[1], expected[1], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    assert results[2].shape == (0, 20)


def test_a_wrong_operand_is_refused(capfd):
    g = Graph()
    w = g.constant(torch.ones(8, 16, dtype=torch.uint32))
    scales, biases = (g.constant(torch.ones(8, 4)) for _ in range(2))
    node = ir.Int8QuantizedMatmulNode(
        x=g.input((2, 64)), w=w, scales=scales, biases=biases, out=g.output((2, 8)), group_size=32, bits=4
    )
    g.emit(node)
    with pytest.raises(RuntimeError):
        g.run(torch.ones(2, 64))
    assert "x: got float32[2,64], expected float32, float16 or bfloat16 of shape [..., 128]" in capfd.readouterr().err
