"""Compares sequences of kernels on the GPU with the CPU, where other operations read results in the middle of one.

python benchmarks/cuda/sequences.py export FOLDER     writes the programs; needs no GPU
python benchmarks/cuda/sequences.py FOLDER            compares all results; run.sh calls it
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from op_runner import run, write

DTYPES = {"float32": 1e-4, "bfloat16": 3e-2}  # dtype → limit of the error, relative to the largest element
SIZE, CALLS = 128, 3


def export(folder: Path) -> None:
    import torch
    import torch.nn.functional as F
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.output, self.gate, self.up, self.down, self.last = (
                torch.nn.Linear(SIZE, SIZE, bias=False) for _ in range(7)
            )
            self.norm = torch.nn.Parameter(1 + 0.3 * torch.randn(SIZE))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = x.to(self.norm.dtype).transpose(0, 1).reshape(1, 1, SIZE)  # this changes the order of the elements
            normalized = F.rms_norm(x, (SIZE,), self.norm, 1e-6)
            query, key = self.query(normalized), self.key(normalized)
            total = x + self.output(query)
            normalized = F.rms_norm(total, (SIZE,), self.norm, 1e-6)
            product = F.silu(self.gate(normalized)) * self.up(normalized)
            y = total + self.down(product)
            heads = key.view(1, 4, SIZE // 4).transpose(1, 2)
            # exp() first needs the middle of the sequence, so that its end becomes a sequence of its own. The last
            # result comes from a sequence that starts from other operations.
            return torch.exp(total), y, total, product, heads, torch.exp(query) + key, self.last(torch.tanh(y) * total)

    for dtype in DTYPES:
        torch.manual_seed(0)
        model = Layer().to(getattr(torch, dtype)).eval().requires_grad_(False)
        program = torch.export.export(model, (torch.zeros(4, SIZE // 4),))
        edge = to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()])
        (folder / f"sequences-{dtype}.pte").write_bytes(edge.to_executorch().buffer)


def compare(dtype: str, limit: float, programs: Path) -> None:
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        inputs = []
        for call in range(CALLS):
            inputs.append(folder / f"in{call}")
            inputs[-1].mkdir()
            write(inputs[-1] / "0.tensor", rng.standard_normal((4, SIZE // 4), dtype=np.float32))
        on_gpu, on_cpu = (
            [x.float() for results in run(programs / f"sequences-{dtype}.pte", inputs, device, folder) for x in results]
            for device in ("gpu", "cpu")
        )
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(on_gpu, on_cpu, strict=True)]
    print(f"sequences, {dtype}: largest error of {len(errors)} results {max(errors):.1e} (limit {limit:.0e})")
    assert max(errors) <= limit


def main() -> None:
    if sys.argv[1] == "export":
        return export(Path(sys.argv[2]))
    for dtype, limit in DTYPES.items():
        compare(dtype, limit, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
