"""Measures the cost of row invariance: in our matrix products, a row of the result does not depend on the other rows.

    python benchmarks/invariance.py                      # against OpenBLAS, float32
    python benchmarks/invariance.py --against LIBRARY    # another libmlx_cpu_kernels.so with the same functions
    python benchmarks/invariance.py --integers 8 --against build/libmlx_cpu_kernels.so    # activations as integers
    python benchmarks/invariance.py --panels --against build/libmlx_cpu_kernels.so        # float weights packed
    OPENBLAS_NUM_THREADS=1 python benchmarks/invariance.py --cpu-time    # on a machine that does other work too

Times y [M, N] = x [M, K] @ w.T with the shapes of Qwen3-0.6B. Two libraries take turns: the new one is `--library`, and
the old one is OpenBLAS or `--against`. The script prints the median of the ratios new / old. For the new library, it
also prints

- the median time,
- the throughput of M rows relative to one row,
- the bandwidth at which w is read, also as a share of the machine's limit,
- the floating-point operations per second, also as a share of the machine's limit.

For the old library, it multiplies each of the first 16 rows of x also alone, and prints the number of rows whose result
then differs. The matrices take turns, so that they come from memory and not from the cache. Linux only.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "test"), str(ROOT / "test" / "runtime")]
from kernel_library import KernelLibrary  # noqa: E402
from product_arguments import BFLOAT16, FLOAT32, HalfMatmul, Matmul, QuantizedMatmul  # noqa: E402

SHAPES = [(1024, 3072), (3072, 1024), (1024, 2048), (1024, 151_936)]  # K, N
ROWS = [1, 4, 8, 16, 64, 128, 512]
FORMATS = ["float32", "bf16", "int8", "int4"]  # of w; with bf16, x and y are bfloat16 too
GROUP_SIZE = 64
BYTES_PER_WEIGHT = {"float32": 4, "bf16": 2, "int8": 1 + 8 / GROUP_SIZE, "int4": 0.5 + 8 / GROUP_SIZE}
WEIGHT_BYTES = 100 << 20  # total size of the matrices that take turns: more than the last-level cache holds


class OpenBlas:
    """The OpenBLAS of scipy-openblas32, with its own threads."""

    def __init__(self):
        import scipy_openblas32

        library = ctypes.CDLL(str(next(Path(scipy_openblas32.get_lib_dir()).glob("libscipy_openblas*.so"))))
        library.scipy_openblas_set_num_threads(thread_count())
        self.cblas_sgemm = library.scipy_cblas_sgemm


def thread_count() -> int:
    return int(os.environ.get("OPENBLAS_NUM_THREADS") or len(os.sched_getaffinity(0)))


class IntegerActivations:
    """`library`, except that products with quantized weights round the activations to integers of 8, 16 or 24 bits.

    The weights are packed at their first product, as the runtime packs them at load.
    """

    def __init__(self, library, bits: int):
        self._library = library
        self._multiply = library.int8_matmul if bits == 8 else library.integer_matmul
        self._panels = {}  # by the address of the weights

    def quantized_matmul(self, reference, count):
        matmul = reference._obj
        if matmul.w not in self._panels:
            panels = memory(self._library.integer_panels_size(reference))
            self._library.pack_integer_panels(reference, address(panels))
            self._panels[matmul.w] = panels
        matmul.integer_panels = self._panels[matmul.w].ctypes.data
        self._multiply(reference, count)


class PackedFloats:
    """`library`, except that float32 and bfloat16 weights are packed at their first product, as at load."""

    def __init__(self, library):
        self._library = library
        library.panels_size.restype = ctypes.c_size_t
        self._panels = {}  # by the address of the weights

    def _packed(self, w: int, kind: int, n: int, k: int) -> int:
        if w not in self._panels:
            panels = memory(self._library.panels_size(kind, n, k))
            self._library.pack_panels(ctypes.c_void_p(w), kind, n, k, address(panels))
            self._panels[w] = panels
        return self._panels[w].ctypes.data

    def cblas_sgemm(self, order, _trans_a, _trans_b, m, n, k, alpha, x, _ldx, w, _ldw, _beta, y, _ldy):
        panels = self._packed(w.value, FLOAT32, n, k)
        matmul = Matmul(x.value, w.value, 1, k, None, 0, m, n, k, alpha, 1, y.value, panels)
        self._library.matmuls(ctypes.byref(matmul), 1)

    def half_matmul(self, reference, count):
        matmul = reference._obj
        matmul.panels = self._packed(matmul.w, BFLOAT16, matmul.n, matmul.k)
        self._library.half_matmul(reference, count)


def memory(size: int) -> np.ndarray:
    """Bytes at the beginning of a cache line, on large pages if the system gives them."""
    data = np.empty(size + (2 << 20), np.uint8)
    data = data[-data.ctypes.data % (1 << 20) :][:size]
    ctypes.CDLL(None).madvise(address(data), ctypes.c_size_t(size // 4096 * 4096), 14)  # MADV_HUGEPAGE
    return data


def address(x: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.ctypes.data)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The bits of `x` in bfloat16, rounded towards zero."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def random_weights(weight_format: str, n: int, k: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """The arrays of one matrix: the values, or if quantized the packed words, scales and biases."""
    if weight_format == "float32":
        return (rng.standard_normal((n, k), np.float32),)
    if weight_format == "bf16":
        return (bfloat16(rng.standard_normal((n, k), np.float32)),)
    words = rng.integers(0, 2**32, (n, k * int(weight_format[3:]) // 32), np.uint32)
    return words, *(rng.standard_normal((n, k // GROUP_SIZE), np.float32) for _ in range(2))


def multiply(library, weight_format: str, x: np.ndarray, w: tuple[np.ndarray, ...], y: np.ndarray) -> None:
    (m, k), n = x.shape, y.shape[1]
    kind = FLOAT32 if x.dtype == np.float32 else BFLOAT16
    if weight_format == "float32":
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        order = 101, 111, 112  # row-major, x as it is, w transposed
        library.cblas_sgemm(*order, m, n, k, one, address(x), k, address(w[0]), k, zero, address(y), n)
    elif weight_format == "bf16":
        matmul = HalfMatmul(x.ctypes.data, w[0].ctypes.data, BFLOAT16, k, 1, m, n, k, y.ctypes.data, kind, kind)
        library.half_matmul(ctypes.byref(matmul), 1)
    else:
        arrays = (a.ctypes.data for a in (x, *w))
        matmul = QuantizedMatmul(*arrays, 0, int(weight_format[3:]), GROUP_SIZE, m, n, k, y.ctypes.data, kind)
        library.quantized_matmul(ctypes.byref(matmul), 1)


def seconds_per_product(library, weight_format, x, weights, y, clock) -> float:
    """The mean time of one product, over one product with each matrix."""
    begin = clock()
    for w in weights:
        multiply(library, weight_format, x, w, y)
    return (clock() - begin) / len(weights)


def differing_rows(library, weight_format, x, w, n) -> int:
    """The number of rows of `x` whose result in `x @ w.T` differs from the result of a product of that row alone."""
    together, alone = np.empty((len(x), n), x.dtype), np.empty((1, n), x.dtype)
    multiply(library, weight_format, x, w, together)
    count = 0
    for row in range(len(x)):
        multiply(library, weight_format, np.ascontiguousarray(x[row : row + 1]), w, alone)
        count += not np.array_equal(alone[0], together[row])
    return count


def compare(new, old, weight_format, k, n, rows, repeats, limits, clock, half_activations) -> None:
    rng = np.random.default_rng(0)
    size = k * n * BYTES_PER_WEIGHT[weight_format]
    weights = [random_weights(weight_format, n, k, rng) for _ in range(max(1, round(WEIGHT_BYTES / size)))]
    row_seconds = None  # per row, with the smallest M
    for m in rows:
        x, y = rng.standard_normal((m, k), np.float32), np.empty((m, n), np.float32)
        if half_activations:
            x, y = bfloat16(x), np.empty((m, n), np.uint16)
        times = [
            tuple(seconds_per_product(library, weight_format, x, weights, y, clock) for library in (new, old))
            for _ in range(repeats + 1)
        ][1:]
        new_time, ratio = statistics.median(t for t, _ in times), statistics.median(t / s for t, s in times)
        row_seconds = row_seconds or new_time / m
        bandwidth, flops = size / new_time / 1e9, 2 * m * n * k / new_time / 1e9
        differing = f"{differing_rows(old, weight_format, x[:16], weights[0], n):3d}/{min(m, 16)}" if m > 1 else ""
        print(
            f"{weight_format:8} {k:5} {n:7} {m:4} {new_time * 1e6:10.0f} us {ratio:6.2f}"
            f" {m * row_seconds / new_time:7.1f} x"
            f" {bandwidth:6.1f} GB/s ({bandwidth / limits[0]:4.0%}) {flops:6.0f} GFLOP/s ({flops / limits[1]:4.0%})"
            f"  {differing}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = ROOT / "build"
    parser.add_argument("--library", type=Path, default=build / "libmlx_cpu_kernels.so")
    parser.add_argument("--against", type=Path, help="another libmlx_cpu_kernels.so; by default OpenBLAS, float32 only")
    parser.add_argument("--formats", nargs="+", choices=FORMATS)
    parser.add_argument("--shapes", nargs="+", type=int, help="indices into the list of shapes", default=range(4))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--bandwidth", type=float, default=45, help="limit of the memory, in GB/s")
    parser.add_argument("--flops", type=float, default=460, help="limit of all processors, in GFLOP/s")
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU time; needs OPENBLAS_NUM_THREADS=1")
    parser.add_argument(
        "--integers",
        type=int,
        choices=[8, 16, 24],
        metavar="BITS",
        help="round the activations of the new library to integers of 8, 16 or 24 bits; int8 and int4 only. With 16, "
        "activations are bfloat16 in both libraries",
    )
    parser.add_argument("--panels", action="store_true", help="pack float weights for the new library, as at load")
    arguments = parser.parse_args()
    if arguments.cpu_time and thread_count() > 1:
        parser.error(f"--cpu-time: got {thread_count()} threads, expected OPENBLAS_NUM_THREADS=1")
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    new = KernelLibrary(arguments.library.resolve())
    old = KernelLibrary(arguments.against.resolve()) if arguments.against else OpenBlas()
    if arguments.integers:
        new = IntegerActivations(new, arguments.integers)
        arguments.formats = arguments.formats or ["int8", "int4"]
    if arguments.panels:
        new = PackedFloats(new)
        arguments.formats = arguments.formats or ["float32", "bf16"]
    print(f"{thread_count()} threads; limits: {arguments.bandwidth} GB/s, {arguments.flops} GFLOP/s")
    print(
        "format       K       N    M          time new/old  throughput   weights read          arithmetic"
        "          rows of old that differ"
    )
    limits = arguments.bandwidth, arguments.flops
    for weight_format in arguments.formats or (FORMATS if arguments.against else FORMATS[:1]):
        half = weight_format == "bf16" or arguments.integers == 16
        for k, n in (SHAPES[i] for i in arguments.shapes):
            compare(new, old, weight_format, k, n, arguments.rows, arguments.repeats, limits, clock, half)


if __name__ == "__main__":
    main()
