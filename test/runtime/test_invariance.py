"""A row of a result has the same bits, whatever the number of rows: in one call, one row at a time, or in any parts."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from product_arguments import BFLOAT16, FLOAT16, FLOAT32, SILU, HalfMatmul, Matmul, QuantizedMatmul
from test_blas import NO_TRANSPOSE, ROW_MAJOR, TRANSPOSE
from test_cpu_kernels import Rope, address, attend, encode, heads_of, random_tensor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="libmlx_cpu_kernels is built on Linux only")

ROWS = 150
PARTS = [[1], [2], [3, 1, 7], [8], [16, 5], [33], [64], [150]]  # numbers of rows of successive calls, repeated
SHAPES = [(1024, 203), (1, 9), (37, 17), (300, 1), (513, 130), (64, 50), (1030, 49)]  # k, n


def in_parts(lengths, total=ROWS):
    """Yield slices of the numbers 0 to `total - 1`. Their lengths follow `lengths`, repeated."""
    first, i = 0, 0
    while first < total:
        last = min(total, first + lengths[i % len(lengths)])
        yield slice(first, last)
        first, i = last, i + 1


def assert_parts_do_not_matter(compute, total=ROWS):
    """Compare the bits of the rows that `compute` returns for each division into `PARTS`.

    `compute(rows)` takes a slice and returns its rows, in the first axis of a torch tensor or numpy array.
    """
    results = []
    for lengths in PARTS:
        parts = [np.asarray(compute(rows)) for rows in in_parts(lengths, total)]
        results.append(np.concatenate(parts).view(np.int32))
    assert len(np.unique(results[0])) > 1
    for lengths, result in zip(PARTS, results, strict=True):
        np.testing.assert_array_equal(result, results[0], err_msg=f"in parts of {lengths}")


# -- matrix products --------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha, beta", [(1, 0), (0.3, 0), (1, 1), (0.7, 0.3)])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("k, n", SHAPES)
def test_sgemm(library, k, n, trans_b, alpha, beta):
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(s, np.float32) for s in ((ROWS, k), (n, k) if trans_b else (k, n), (ROWS, n)))

    def compute(rows):
        x, y = a[rows].copy(), c[rows].copy()
        library.cblas_sgemm(
            ROW_MAJOR,
            NO_TRANSPOSE,
            TRANSPOSE if trans_b else NO_TRANSPOSE,
            len(x),
            n,
            k,
            ctypes.c_float(alpha),
            array_address(x),
            k,
            array_address(b),
            b.shape[1],
            ctypes.c_float(beta),
            array_address(y),
            n,
        )
        return y

    assert_parts_do_not_matter(compute)


def array_address(x):
    return ctypes.c_void_p(x.ctypes.data)


@pytest.mark.parametrize("addend", ["rows", "row", None])
@pytest.mark.parametrize("k, n", SHAPES)
def test_matmul(library, k, n, addend):
    rng = np.random.default_rng(0)
    x, b, c = (rng.standard_normal(s, np.float32) for s in ((ROWS, k), (k, n), (ROWS if addend == "rows" else 1, n)))

    def compute(rows):
        m, y = rows.stop - rows.start, np.empty((rows.stop - rows.start, n), np.float32)
        matmul = Matmul(
            x[rows].ctypes.data,
            b.ctypes.data,
            n,
            1,
            None if addend is None else c[rows].ctypes.data if addend == "rows" else c.ctypes.data,
            n if addend == "rows" else 0,
            m,
            n,
            k,
            1,
            1,
            y.ctypes.data,
        )
        library.matmul(ctypes.byref(matmul))
        return y

    assert_parts_do_not_matter(compute)
    all_rows = slice(0, ROWS)
    expected = x @ b.astype(np.float64) + (0 if addend is None else c)
    np.testing.assert_allclose(compute(all_rows), expected, rtol=0, atol=3e-6 * (np.abs(x) @ np.abs(b)).max())


def test_sgemm_with_one_row_or_column_ignores_the_transposes(library):
    """For a matrix of one row or column, MLX may describe the same memory in both ways."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((1, 300), np.float32), rng.standard_normal((300, 1), np.float32)
    results = set()
    for trans_a, lda in ((NO_TRANSPOSE, 300), (TRANSPOSE, 1)):
        for trans_b, ldb in ((NO_TRANSPOSE, 1), (TRANSPOSE, 300)):
            y = np.empty((1, 1), np.float32)
            library.cblas_sgemm(
                ROW_MAJOR,
                trans_a,
                trans_b,
                1,
                1,
                300,
                ctypes.c_float(1),
                array_address(a),
                lda,
                array_address(b),
                ldb,
                ctypes.c_float(0),
                array_address(y),
                1,
            )
            results.add(y.item())
    assert len(results) == 1


@pytest.mark.parametrize("k, n", SHAPES)
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
def test_half_matmul(library, dtype, column_major, k, n):
    rng = np.random.default_rng(2)
    w = encode(rng.standard_normal((k, n) if column_major else (n, k), np.float32), dtype)
    strides = (1, n) if column_major else (k, 1)
    x = rng.standard_normal((ROWS, k), np.float32)

    def compute(rows):
        part = x[rows]
        y = np.empty((len(part), n), np.float32)
        matmul = HalfMatmul(
            part.ctypes.data, w.ctypes.data, dtype, *strides, len(part), n, k, y.ctypes.data, FLOAT32, FLOAT32
        )
        library.half_matmul(ctypes.byref(matmul), 1)
        return y

    assert_parts_do_not_matter(compute)


@pytest.mark.parametrize("k, n", [(1024, 203), (2, 9), (300, 1), (514, 130), (37, 17)])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=["float16", "bfloat16"])
def test_half_matmul_of_half_operands(library, dtype, k, n):
    rng = np.random.default_rng(2)
    x, w = (encode(rng.standard_normal(shape, np.float32), dtype) for shape in ((ROWS, k), (n, k)))

    def compute(rows):
        part = x[rows]
        y = np.empty((len(part), n), np.float32)
        matmul = HalfMatmul(
            part.ctypes.data, w.ctypes.data, dtype, k, 1, len(part), n, k, y.ctypes.data, dtype, FLOAT32
        )
        library.half_matmul(ctypes.byref(matmul), 1)
        return y

    assert_parts_do_not_matter(compute)


@pytest.mark.parametrize("scale_type", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantized_matmul(library, bits, group_size, scale_type):
    for groups in (9, 24):  # with 24, rows of x can be larger than the first-level cache
        assert_quantized_parts_do_not_matter(library.quantized_matmul, bits, group_size, scale_type, groups)


@pytest.mark.parametrize("scale_type", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["int8_matmul", "integer_matmul"])
def test_integer_matmul(library, name, bits, group_size, scale_type):
    for groups in (8, 9):
        assert_quantized_parts_do_not_matter(getattr(library, name), bits, group_size, scale_type, groups)


def assert_quantized_parts_do_not_matter(multiply, bits, group_size, scale_type, groups):
    rng = np.random.default_rng(1)
    k, n = groups * group_size, 131
    w = rng.integers(0, 2**32, (n, k * bits // 32), np.uint32)
    scales, biases = (encode(rng.standard_normal((n, k // group_size), np.float32), scale_type) for _ in range(2))
    x = rng.standard_normal((ROWS, k), np.float32)

    def compute(rows):
        part = x[rows]
        y = np.empty((len(part), n), np.float32)
        arrays = (a.ctypes.data for a in (part, w, scales, biases))
        matmul = QuantizedMatmul(*arrays, scale_type, bits, group_size, len(part), n, k, y.ctypes.data, FLOAT32)
        multiply(ctypes.byref(matmul), 1)
        return y

    assert_parts_do_not_matter(compute)


# -- attention --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask_kind", ["causal", "bool mask", "float mask"])
@pytest.mark.parametrize("memory_order", [(0, 1, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, v_width", [(24, 10), (128, 128)])
def test_attention(library, mask_kind, memory_order, dtype, width, v_width):
    """Each call gets the keys up to its last query, as in a prefill in chunks. A query sees no later keys."""
    generator = torch.Generator().manual_seed(0)
    q = random_tensor(generator, (1, 6, ROWS, width), memory_order).to(dtype)
    k, v = (random_tensor(generator, (1, 3, ROWS, w), memory_order).to(dtype) for w in (width, v_width))
    mask = torch.ones(ROWS, ROWS, dtype=torch.bool).tril()
    if mask_kind == "float mask":
        mask = torch.where(mask, torch.randn(ROWS, ROWS, generator=generator), -torch.inf)

    def compute(rows):
        keys = slice(0, rows.stop)
        arguments = {"causal": True} if mask_kind == "causal" else {"mask": mask[rows, keys]}
        return attend(library, q[:, :, rows], k[:, :, keys], v[:, :, keys], **arguments)[0].transpose(0, 1).float()

    assert_parts_do_not_matter(compute)


def test_attention_over_more_masked_keys(library):
    """A cache that holds stale keys gives the same result as one that ends at the last visible key."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 32, generator=generator) for n in (5, 300, 300))
    expected = attend(library, q, k[:, :, :41], v[:, :, :41])
    for keys in (42, 48, 64, 300):
        mask = torch.arange(keys).expand(5, keys) < 41
        assert torch.equal(attend(library, q, k[:, :, :keys], v[:, :, :keys], mask=mask), expected), keys


# -- the other kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [17, 128, 1024, 1030])
def test_rms_norm(library, width):
    generator = torch.Generator().manual_seed(width)
    x, weight = torch.randn(ROWS, width, generator=generator), torch.randn(width, generator=generator)

    def compute(rows):
        y = torch.empty_like(x[rows])
        sizes = (ctypes.c_int64(len(y)), ctypes.c_int64(width))
        library.norm(
            address(x[rows]), FLOAT32, False, address(weight), None, FLOAT32, address(y), *sizes, ctypes.c_float(1e-5)
        )
        return y

    assert_parts_do_not_matter(compute)


@pytest.mark.parametrize("width", [1, 17, 1000])
def test_silu(library, width):
    x = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)) * 5

    def compute(rows):
        y = torch.empty_like(x[rows])
        library.unary(SILU, address(x[rows]), FLOAT32, address(y), ctypes.c_int64(y.numel()))
        return y

    assert_parts_do_not_matter(compute)


def test_rope(library):
    x = torch.randn(1, 3, ROWS, 24, generator=torch.Generator().manual_seed(0))

    def compute(rows):
        part = x[:, :, rows]
        y, offset = torch.empty(part.shape), torch.tensor([7 + rows.start], dtype=torch.int32)
        rope = Rope(heads_of(part), *part.shape, 12, address(offset), False, None, 1e4, 1.0, address(y))
        library.rope(ctypes.byref(rope))
        return y[0].transpose(0, 1)

    assert_parts_do_not_matter(compute)


# -- threads ----------------------------------------------------------------------------------------

PRINT_PRODUCT = """
import ctypes, sys, numpy as np
library = ctypes.CDLL(sys.argv[1])
rng = np.random.default_rng(0)
x, w, b = (rng.standard_normal(s, np.float32) for s in ((100, 700), (333, 700), (700, 333)))
p = lambda a: ctypes.c_void_p(a.ctypes.data)
for m in (1, 5, 100):
    for transpose, matrix in ((112, w), (111, b)):
        y = np.empty((m, 333), np.float32)
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        columns = matrix.shape[1]
        library.cblas_sgemm(101, 111, transpose, m, 333, 700, one, p(x), 700, p(matrix), columns, zero, p(y), 333)
        print(y.tobytes().hex())
"""


def test_the_number_of_threads_does_not_matter(delegate):
    path = Path(delegate).parent / "libmlx_cpu_kernels.so"
    command = [sys.executable, "-c", PRINT_PRODUCT, path]
    outputs = {
        subprocess.run(
            command, env=os.environ | {"OPENBLAS_NUM_THREADS": n}, capture_output=True, check=True, timeout=100
        ).stdout
        for n in ("1", "2", "3")
    }
    assert len(outputs) == 1
