"""Products with weights that are packed in panels: each result has the bits of the product with the weights as they
are."""

import ctypes
import sys

import numpy as np
import pytest
from product_arguments import BFLOAT16, FLOAT16, FLOAT32, HalfMatmul, Matmul
from test_cpu_kernels import encode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")

COLUMNS = (5, 300, 64, 1)  # of products that are computed together
ROWS = pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 50, 130])


def panels_size(library, w_type, n, k) -> int:
    library.panels_size.restype = ctypes.c_size_t
    return library.panels_size(w_type, n, k)


def packed(library, w, w_type):
    size = panels_size(library, w_type, *w.shape)
    panels = np.full(size + 64, 0xFF, np.uint8)  # NaNs: a result shows them if a kernel reads what was not written
    panels = panels[-panels.ctypes.data % 64 :][:size]
    library.pack_panels(ctypes.c_void_p(w.ctypes.data), w_type, *w.shape, ctypes.c_void_p(panels.ctypes.data))
    return panels


def check(library, name, weights, w_type, make):
    """`make(i, y, panels)` returns the arguments of product i, whose result goes to the address y."""
    panels = [packed(library, w, w_type) for w in weights]
    results = []
    for addresses in ([None] * len(weights), [p.ctypes.data for p in panels]):
        ys = [np.full((130, n), 7, np.float32) for n in COLUMNS]
        products = [make(i, y.ctypes.data, addresses[i]) for i, y in enumerate(ys)]
        getattr(library, name)((type(products[0]) * len(products))(*products), len(products))
        results.append(ys)
        for w in weights:
            w.fill(0)  # the second time, only the panels have the weights
    for y, expected in zip(*reversed(results), strict=True):
        np.testing.assert_array_equal(y.view(np.uint32), expected.view(np.uint32))


@ROWS
@pytest.mark.parametrize("k", [257, 300, 1024])
def test_float32(library, k, m):
    """Some products add a bias, and some a matrix."""
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, k), np.float32)
    weights = [rng.standard_normal((n, k), np.float32) for n in COLUMNS]
    addends = [rng.standard_normal((m, n), np.float32) for n in COLUMNS]

    def product(i, y, panels):
        n = COLUMNS[i]
        c = None if n == 300 else addends[i].ctypes.data
        stride = n if n == 64 else 0
        pointers = x.ctypes.data, weights[i].ctypes.data
        return Matmul(*pointers, 1, k, c, stride, m, n, k, 1, 1, y, panels)

    check(library, "matmuls", weights, FLOAT32, product)


@ROWS
@pytest.mark.parametrize("k", [258, 600, 2050])
def test_bfloat16(library, k, m):
    """The results are float32 and bfloat16 in turns."""
    if panels_size(library, BFLOAT16, 16, k) == 0:
        pytest.skip("these kernels do not use panels of bfloat16")
    rng = np.random.default_rng(m)
    x = encode(rng.standard_normal((m, k), np.float32), BFLOAT16)
    weights = [encode(rng.standard_normal((n, k), np.float32), BFLOAT16) for n in COLUMNS]

    def product(i, y, panels):
        pointers, y_type = (x.ctypes.data, weights[i].ctypes.data), FLOAT32 if i % 2 else BFLOAT16
        return HalfMatmul(*pointers, BFLOAT16, k, 1, m, COLUMNS[i], k, y, BFLOAT16, y_type, panels)

    check(library, "half_matmul", weights, BFLOAT16, product)


def test_no_kernel_uses_these_panels(library):
    assert panels_size(library, FLOAT32, 1000, 256) == 0
    assert panels_size(library, FLOAT16, 1000, 1024) == 0
    assert panels_size(library, BFLOAT16, 1000, 1025) == 0
