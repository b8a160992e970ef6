"""Draws 8,000 tokens with SampleNode on the CPU and on the GPU and compares them: 1,000 seeds in eight settings.

python benchmarks/cuda/sampler.py export PROGRAM.pte     writes the program; needs no GPU
python benchmarks/cuda/sampler.py PROGRAM.pte            compares the draws; run.sh calls it
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from op_runner import run, write

ROWS, VOCABULARY = 1000, 8200
INPUTS = ("temperature", "top_p", "seed", "top_k", "min_p")  # the inputs of the program after the logits
SETTINGS = (  # temperature, top_p, top_k, min_p. The seed of a row is its number.
    (0.0, 1.0, 0, 0.0),
    (0.8, 1.0, 0, 0.0),
    (0.9, 0.9, 0, 0.0),
    (1.3, 1.0, 40, 0.0),
    (1.0, 1.0, 0, 0.05),
    (1.0, 0.95, 300, 0.0),
    (0.7, 0.8, 0, 0.1),
    (1.0, 0.9, 40, 0.05),
)


def export(program: str) -> None:
    import torch
    from executorch.exir import to_edge_transform_and_lower
    from executorch_mlx import MLXPartitioner
    from executorch_mlx.custom_kernel_ops.sample import sample

    class Sample(torch.nn.Module):
        def forward(self, logits, *values):
            return sample(logits, **dict(zip(INPUTS, values, strict=True)))

    inputs = [torch.zeros(ROWS, VOCABULARY)]
    inputs += [torch.zeros(ROWS, dtype=torch.int64 if n in ("seed", "top_k") else torch.float32) for n in INPUTS]
    partitioner = MLXPartitioner(allow_extensions=True)
    lowered = to_edge_transform_and_lower(torch.export.export(Sample(), tuple(inputs)), partitioner=[partitioner])
    Path(program).write_bytes(lowered.to_executorch().buffer)


def main() -> None:
    if sys.argv[1] == "export":
        return export(sys.argv[2])
    rng = np.random.default_rng(0)
    rank = rng.permuted(np.tile(np.arange(VOCABULARY, dtype=np.float32), (ROWS, 1)), axis=1)
    logits = (-1.5 * np.log(1 + rank) + 0.1 * rng.standard_normal((ROWS, VOCABULARY), dtype=np.float32)).astype(
        np.float32
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = []
        for call in range(len(SETTINGS)):
            inputs.append(folder / f"in{call}")
            inputs[-1].mkdir()
            settings = [SETTINGS[(row + call) % len(SETTINGS)] for row in range(ROWS)]
            temperature, top_p, top_k, min_p = (list(column) for column in zip(*settings, strict=True))
            values = {"temperature": temperature, "top_p": top_p, "seed": range(ROWS), "top_k": top_k, "min_p": min_p}
            arrays = [np.array(values[n], np.int64 if n in ("seed", "top_k") else np.float32) for n in INPUTS]
            for i, array in enumerate([logits, *arrays]):
                write(inputs[-1] / f"{i}.tensor", array)
        tokens = {
            device: np.stack([results[0].numpy() for results in run(sys.argv[1], inputs, device, folder)])
            for device in ("cpu", "gpu")
        }
    equal = int((tokens["cpu"] == tokens["gpu"]).sum())
    print(f"sampler: {equal} of {tokens['cpu'].size} tokens on the GPU are those on the CPU")


if __name__ == "__main__":
    main()
