"""Products on a CPU: the names of CBLAS that libmlx calls, and the kernels behind them."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from executorch_mlx._load import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MLX has Accelerate elsewhere")

FLOATS = ctypes.POINTER(ctypes.c_float)


def pointer(x: np.ndarray):
    return x.ctypes.data_as(FLOATS)


def sgemm(library, a, b, c, trans_a, trans_b, alpha, beta):
    m, n = c.shape
    k = a.shape[0] if trans_a else a.shape[1]
    numbers = (ctypes.c_float(alpha), pointer(a), a.shape[1], pointer(b), b.shape[1])
    library.cblas_sgemm(
        101, 112 if trans_a else 111, 112 if trans_b else 111, m, n, k, *numbers,
        ctypes.c_float(beta), pointer(c), c.shape[1],
    )


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(
    "m, n, k", [(1, 1, 1), (1, 3072, 1024), (3, 701, 37), (4, 5, 130), (5, 64, 16), (300, 257, 70), (90, 2000, 33)]
)
def test_sgemm(library, m, n, k, trans_a, trans_b):
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s, np.float32) for s in ((m, k), (k, n), (m, n)))
    expected = 0.5 * (a.astype(float) @ b) - 2 * c
    given = (np.ascontiguousarray(x.T if t else x) for x, t in ((a, trans_a), (b, trans_b)))
    sgemm(library, *given, c, trans_a, trans_b, 0.5, -2)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-5 * k**0.5)


ORDERS = {
    "first": ("from executorch_mlx import load_delegate; path = load_delegate(); import mlx.core", "OpenBLAS", 0),
    "second": ("import mlx.core; from executorch_mlx import load_delegate; path = load_delegate()", "mlx, loaded first", 1),
}


@pytest.mark.parametrize("order", ORDERS)
def test_which_blas_answers(order):
    """Ours, unless mlx is there already: then load_delegate says so, once."""
    text, name, warnings = ORDERS[order]
    text += "; from executorch_mlx._load import blas; load_delegate(); print(blas(path))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip().startswith(name), done.stderr
    assert done.stderr.count("call executorch_mlx.load_delegate() before importing mlx") == warnings


def test_beta_of_zero_does_not_read(library):
    a, b = np.ones((1, 40), np.float32), np.ones((9, 40), np.float32)
    c = np.full((1, 9), np.nan, np.float32)
    sgemm(library, a, b, c, False, True, 1, 0)
    assert (c == 40).all()


class Product(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "w", "scales", "biases")]
    _fields_ += [(name, ctypes.c_int) for name in ("scale_type", "bits", "group_size", "m", "n", "k")]
    _fields_ += [("y", ctypes.c_void_p)]


def as_bfloat16(x):
    return (x.view(np.uint32) >> 16).astype(np.uint16)


SCALES = [  # as they are stored, and what they are
    (lambda x: x, lambda x: x),
    (lambda x: x.astype(np.float16).view(np.uint16), lambda x: x.view(np.float16).astype(np.float32)),
    (as_bfloat16, lambda x: (x.astype(np.uint32) << 16).view(np.float32)),
]


class HalfProduct(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_void_p), ("w", ctypes.c_void_p), ("type", ctypes.c_int), ("row", ctypes.c_int64),
        ("column", ctypes.c_int64), *((name, ctypes.c_int) for name in ("m", "n", "k")), ("y", ctypes.c_void_p),
    ]


@pytest.mark.parametrize("kind", [1, 2], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("m, n, k", [(1, 203, 1024), (3, 17, 5), (70, 600, 100)])
def test_half_product(library, kind, by_columns, m, n, k):
    rng = np.random.default_rng(2)
    store, read = SCALES[kind]
    w = store(rng.standard_normal((k, n) if by_columns else (n, k), np.float32))
    dense = read(w).T if by_columns else read(w)
    x, y = rng.standard_normal((m, k), np.float32), np.full((m, n), np.nan, np.float32)
    strides = (1, n) if by_columns else (k, 1)
    product = HalfProduct(x.ctypes.data, w.ctypes.data, kind, *strides, m, n, k, y.ctypes.data)
    library.executorch_mlx_half_product(ctypes.byref(product))
    assert np.abs(y - x @ dense.T.astype(float)).max() < 3e-6 * (np.abs(x) @ np.abs(dense).T).max()


@pytest.mark.parametrize("kind", [1, 2], ids=["float16", "bfloat16"])
def test_every_half(library, kind):
    w = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1)
    x, y = np.ones((1, 1), np.float32), np.empty((1, 1 << 16), np.float32)
    product = HalfProduct(x.ctypes.data, w.ctypes.data, kind, 1, 1, 1, 1 << 16, 1, y.ctypes.data)
    library.executorch_mlx_half_product(ctypes.byref(product))
    np.testing.assert_array_equal(y, SCALES[kind][1](w).T)


@pytest.mark.parametrize("scale_type", [0, 1, 2])
@pytest.mark.parametrize("m", [1, 2, 7, 40])
@pytest.mark.parametrize("bits, group, k", [(4, 32, 96), (4, 64, 1024), (4, 128, 384), (8, 32, 160), (8, 64, 64), (8, 128, 256), (2, 64, 192)])
def test_quantized_product(library, bits, group, k, m, scale_type):
    rng = np.random.default_rng(1)
    n = 203
    q = rng.integers(0, 2**bits, (n, k))
    lanes = q.reshape(n, -1, 32 // bits).astype(np.uint64) << (np.arange(32 // bits, dtype=np.uint64) * bits)
    w = lanes.sum(-1).astype(np.uint32)
    x = rng.standard_normal((m, k), np.float32)
    store, read = SCALES[scale_type]
    scales, biases = (store(rng.standard_normal((n, k // group), np.float32)) for _ in range(2))
    dense = q * read(scales).repeat(group, 1).astype(float) + read(biases).repeat(group, 1)
    y = np.full((m, n), np.nan, np.float32)
    arrays = (a.ctypes.data for a in (x, w, scales, biases))
    product = Product(*arrays, scale_type, bits, group, m, n, k, y.ctypes.data)
    assert library.executorch_mlx_quantized_is_fast(bits, group, k)
    library.executorch_mlx_quantized_product(ctypes.byref(product))
    expected = x @ dense.T
    assert np.abs(y - expected).max() < 3e-6 * (np.abs(x) @ np.abs(dense).T).max()
