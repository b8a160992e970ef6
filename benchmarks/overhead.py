"""The overhead of the delegate: compares programs with the same computations in MLX alone.

    python benchmarks/overhead.py

1. A program of about 200 instructions, called from C++ through ExecuTorch, against the same graph
   written by hand with mlx::core in the same process.
2. A program of one instruction, called from Python through ExecuTorch, against MLX from Python. Both
   take and return torch tensors.

`bar` is the largest ratio that is allowed.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner

ROOT = Path(__file__).resolve().parent.parent


class Layers(torch.nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        for _ in range(self.layers):
            x = torch.tanh(x * 0.5 + 0.25)
        return x


class Exp(torch.nn.Module):
    def forward(self, x):
        return torch.exp(x)


def lower(module: torch.nn.Module, x: torch.Tensor):
    program = torch.export.export(module, (x,))
    return to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()]).to_executorch()


def from_cpp(layers: int, calls: int, rows: int, columns: int) -> tuple[float, float]:
    """Return the median microseconds of a call from C++: through ExecuTorch, and of the same graph written by hand."""
    build = ROOT / "build"
    cmake = [sys.executable, "-m", "cmake"]
    configure = [*cmake, "-S", str(ROOT), "-B", str(build), "-DEXECUTORCH_MLX_BENCHMARKS=ON"]
    for command in (configure, [*cmake, "--build", str(build), "--target", "overhead_benchmark"]):
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.pte"
        path.write_bytes(lower(Layers(layers), torch.zeros(rows, columns)).buffer)
        arguments = map(str, (path, rows, columns, layers, calls))
        binary = build / "benchmarks/overhead/overhead_benchmark"
        printed = subprocess.run([binary, *arguments], check=True, capture_output=True, text=True)
    ours, by_hand = map(float, printed.stdout.split())
    return ours, by_hand


def from_python(calls: int, rows: int, columns: int) -> tuple[float, float]:
    """Return the median microseconds of a call from Python: through ExecuTorch, and of the same function in MLX."""
    import mlx.core as mx
    import numpy as np
    from executorch_mlx import Runtime  # before mlx, so that MLX uses OpenBLAS

    x = torch.rand(rows, columns)
    program = Runtime.get().load_program(lower(Exp(), x).buffer)
    method = program.load_method("forward")

    def through_executorch():
        return method.execute([x])[0]

    def through_mlx():
        y = mx.exp(mx.array(x.numpy()))
        mx.eval(y)
        return torch.from_numpy(np.array(y))

    times: dict = {through_executorch: [], through_mlx: []}
    for _ in range(calls):
        for call, spent in times.items():
            start = time.perf_counter()
            result = call()
            spent.append((time.perf_counter() - start) * 1e6)
            torch.testing.assert_close(result, x.exp())
    return tuple(statistics.median(spent) for spent in times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=67, help="layers of three instructions each")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--columns", type=int, default=16)
    options = parser.parse_args()
    size = (options.calls, options.rows, options.columns)

    ours, by_hand = from_cpp(options.layers, *size)
    instructions = 3 * options.layers
    print(f"{instructions} instructions, C++: ours {ours:.1f} us, by hand {by_hand:.1f} us")
    print(f"  ratio {ours / by_hand:.2f}   (bar 1.10)")
    ours, mlx = from_python(*size)
    print(f"1 instruction, Python: ours {ours:.1f} us, mlx {mlx:.1f} us")
    print(f"  ratio {ours / mlx:.2f}   (bar 2.00)")


if __name__ == "__main__":
    main()
