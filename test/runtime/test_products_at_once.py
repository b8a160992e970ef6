"""The kernels that compute several products of the same x at once: each result has the bits of a product by itself."""

import ctypes
import sys

import numpy as np
import pytest
from product_arguments import BFLOAT16, FLOAT16, FLOAT32, HalfMatmul, Matmul, QuantizedMatmul
from test_cpu_kernels import encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")

COLUMNS = (5, 300, 64, 1)
ROWS = pytest.mark.parametrize("m", [1, 3, 9, 32, 50, 70])


def check(library, name, make, single=None):
    """`make(n, y)` returns the arguments of a product with n columns, whose result goes to the address y.

    `single` is the function for one product, if it is another one.
    """

    def results(call):
        ys = [np.full((70, n), 7, np.float32) for n in COLUMNS]
        products = [make(n, y.ctypes.data) for n, y in zip(COLUMNS, ys, strict=True)]
        call((type(products[0]) * len(products))(*products), len(products))
        return ys

    def one_by_one(products, count):
        for i in range(count):
            getattr(library, single or name)(ctypes.byref(products[i]), 1)

    for y, alone in zip(results(getattr(library, name)), results(one_by_one), strict=True):
        np.testing.assert_array_equal(y.view(np.uint32), alone.view(np.uint32))


def arrays(*shape, dtype=FLOAT32):
    """A function that returns an array of n rows. For the same n, it returns the same array."""
    made = {}

    def make(n):
        if n not in made:
            made[n] = encode(np.random.default_rng(n).standard_normal((n, *shape), np.float32), dtype)
        return made[n]

    return make


@ROWS
@pytest.mark.parametrize("name", ["quantized_matmul", "int8_matmul", "integer_matmul"])
@pytest.mark.parametrize("bits, group_size, k", [(4, 64, 192), (8, 32, 160), (4, 128, 1024)])
@pytest.mark.parametrize("x_type", [FLOAT32, BFLOAT16])
def test_quantized(library, name, bits, group_size, k, x_type, m):
    rng = np.random.default_rng(1)
    x = encode(rng.standard_normal((m, k), np.float32), x_type)
    words = {n: rng.integers(0, 2**32, (n, k * bits // 32), np.uint32) for n in COLUMNS}
    scale_types = dict(zip(COLUMNS, (FLOAT32, FLOAT16, BFLOAT16, FLOAT32), strict=True))
    scales = {n: arrays(k // group_size, dtype=scale_type)(n) for n, scale_type in scale_types.items()}

    def product(n, y):
        pointers = (a.ctypes.data for a in (x, words[n], scales[n], scales[n]))
        return QuantizedMatmul(*pointers, scale_types[n], bits, group_size, m, n, k, y, x_type)

    check(library, name, product)


@ROWS
@pytest.mark.parametrize("k", [31, 256, 1026])
@pytest.mark.parametrize("x_type, w_type", [(FLOAT32, FLOAT16), (BFLOAT16, BFLOAT16), (FLOAT16, FLOAT16)])
def test_half(library, x_type, w_type, k, m):
    """The results are float32 and half precision in turns."""
    x, w = encode(np.random.default_rng(2).standard_normal((m, k), np.float32), x_type), arrays(k, dtype=w_type)

    def product(n, y):
        return HalfMatmul(
            x.ctypes.data, w(n).ctypes.data, w_type, k, 1, m, n, k, y, x_type, FLOAT32 if n % 2 else x_type
        )

    check(library, "half_matmul", product)


@ROWS
@pytest.mark.parametrize("k", [31, 256, 1024])
def test_float32(library, k, m):
    """Some products add a bias, and some a matrix."""
    x, w = np.random.default_rng(3).standard_normal((m, k), np.float32), arrays(k)
    addends = {n: np.random.default_rng(n).standard_normal((m, n), np.float32) for n in COLUMNS}

    def product(n, y):
        c = None if n == 300 else addends[n].ctypes.data
        stride = n if n == 64 else 0
        return Matmul(x.ctypes.data, w(n).ctypes.data, 1, k, c, stride, m, n, k, 1, 1, y)

    check(library, "matmuls", product, single="matmul")
