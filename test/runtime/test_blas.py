"""The kernels replace MLX's BLAS. They compute float32 products themselves, and forward other dtypes to OpenBLAS."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import torch
from irprograms import Graph, ir
from kernel_library import kernel_library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")

FLOAT_POINTER = ctypes.POINTER(ctypes.c_float)
ROW_MAJOR, NO_TRANSPOSE, TRANSPOSE = 101, 111, 112  # constants of CBLAS


def pointer(x: np.ndarray):
    return x.ctypes.data_as(FLOAT_POINTER)


def sgemm(library, a, b, c, trans_a, trans_b, alpha, beta):
    """c = alpha * a @ b + beta * c, where a and b are stored transposed if trans_a and trans_b say so."""
    m, n = c.shape
    k = a.shape[0] if trans_a else a.shape[1]
    transposes = (TRANSPOSE if trans_a else NO_TRANSPOSE, TRANSPOSE if trans_b else NO_TRANSPOSE)
    operands = (ctypes.c_float(alpha), pointer(a), a.shape[1], pointer(b), b.shape[1])
    library.cblas_sgemm(ROW_MAJOR, *transposes, m, n, k, *operands, ctypes.c_float(beta), pointer(c), c.shape[1])


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize(
    "m, n, k",
    [(1, 1, 1), (1, 3072, 1024), (3, 701, 37), (4, 5, 130), (5, 64, 16), (300, 257, 70), (90, 2000, 33)]
    + [(400_001, 1, 2), (150_001, 2, 40)],  # m * (m / rows of a tile) exceeds 32 bits
)
def test_sgemm(library, m, n, k, trans_a, trans_b):
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s, np.float32) for s in ((m, k), (k, n), (m, n)))
    expected = 0.5 * (a.astype(float) @ b) - 2 * c
    stored = (np.ascontiguousarray(x.T if t else x) for x, t in ((a, trans_a), (b, trans_b)))
    sgemm(library, *stored, c, trans_a, trans_b, 0.5, -2)
    np.testing.assert_allclose(c, expected, rtol=1e-4, atol=1e-5 * k**0.5)


def test_sgemm_with_zero_beta_ignores_nan_in_c(library):
    a, b = np.ones((1, 40), np.float32), np.ones((9, 40), np.float32)
    c = np.full((1, 9), np.nan, np.float32)
    sgemm(library, a, b, c, False, True, 1, 0)
    assert (c == 40).all()


DELEGATE_FIRST = "from executorch_mlx import load_delegate; load_delegate(); import mlx.core"
MLX_FIRST = "import mlx.core; from executorch_mlx import load_delegate; load_delegate()"


@pytest.mark.parametrize(
    "source, name, warnings",
    [(DELEGATE_FIRST, "OpenBLAS", 0), (MLX_FIRST, "mlx, loaded first", 1)],
    ids=["delegate first", "mlx first"],
)
def test_blas_of_the_delegate_is_used_unless_mlx_is_loaded_first(source, name, warnings):
    source += "; from executorch_mlx.loader import blas_name; print(blas_name(load_delegate()))"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip().startswith(name), done.stderr
    assert done.stderr.count("call executorch_mlx.load_delegate() before importing mlx") == warnings


def test_a_transposed_convolution_has_a_kernel(delegate):
    library = kernel_library(delegate)
    library.product_calls.restype = ctypes.c_uint64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 6, 3, generator=generator)
    w = torch.randn(3, 2, 4, generator=generator)  # as in torch: [C, O, kernel]
    g = Graph()
    source, weight = g.input((1, 6, 3), torch.float32), g.constant(w.permute(1, 2, 0).contiguous())
    g.emit(ir.ConvTranspose1DNode(x=source, w=weight, out=g.output((1, 14, 2), torch.float32), stride=2))
    calls = library.product_calls()
    (y,) = g.run(x)
    assert library.product_calls() > calls
    torch.testing.assert_close(y.mT, torch.nn.functional.conv_transpose1d(x.mT, w, stride=2))
