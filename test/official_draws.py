"""Draws tokens as ExecuTorch's own MLX delegate does, and compares them with eager torch.

    python test/official_draws.py               # 1,000 seeds in each of 6 settings: about five minutes on an idle core
    python test/official_draws.py --seeds 50

The interpreter of test/interpreter runs an exported `mlx::sample`. All seeds fit in int32, which that delegate reads.
The script prints how many tokens are equal, and exits with 1 if one differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import executorch_mlx
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx.custom_kernel_ops.sample import sample
from interpreter import OFFICIAL, Program
from sampling_logits import logits_of

VOCABULARY = 32003
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.3, "top_k": 400},
    "top_p": {"temperature": 1.2, "top_p": 0.95},
    "min_p": {"temperature": 1.0, "min_p": 0.001},
    "all": {"temperature": 1.0, "top_k": 3000, "top_p": 0.99, "min_p": 0.0001},
}
OFF = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
DTYPES = {"temperature": torch.float32, "top_p": torch.float32, "seed": torch.int64, "top_k": torch.int64}
DTYPES |= {"min_p": torch.float32}


class Sample(torch.nn.Module):
    def forward(self, logits, temperature, top_p, seed, top_k, min_p):
        return sample(logits, temperature, top_p, seed, top_k=top_k, min_p=min_p)


def arguments(seed: int, setting: str) -> list[torch.Tensor]:
    """The inputs of the draw. The kind of the logits, and their numbers, vary with the seed."""
    logits = logits_of(("text", "flat", "ties")[seed % 3], 1, VOCABULARY, seed % 16)
    values = {**OFF, **SETTINGS[setting], "seed": seed * 2654435761 % 2**32 - 2**31}
    return [logits, *(torch.tensor(values[name], dtype=dtype) for name, dtype in DTYPES.items())]


def draws(seeds: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield the setting, the seed, the token of the interpreter, and that of eager torch."""
    model = Sample()
    exported = torch.export.export(model, tuple(arguments(0, "all")))
    partitioner = executorch_mlx.MLXPartitioner(portable=True)
    lowered = to_edge_transform_and_lower(exported, partitioner=[partitioner]).to_executorch()
    program = Program(bytes(lowered.buffer), OFFICIAL)
    for setting in SETTINGS:
        for seed in range(seeds):
            inputs = arguments(seed, setting)
            (token,) = program.execute("forward", inputs)
            yield setting, seed, int(token), int(model(*inputs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000, help="seeds in each setting (default: 1000)")
    options = parser.parse_args()
    results = list(draws(options.seeds))
    wrong = [result for result in results if result[2] != result[3]]
    for setting, seed, token, expected in wrong[:20]:
        print(f"{setting}, seed {seed}: got {token}, expected {expected}")
    for setting in SETTINGS:
        tokens = {token for name, _, token, _ in results if name == setting}
        print(f"{setting}: {len(tokens)} different tokens")
    print(f"{len(results) - len(wrong)} of {len(results)} tokens equal those of eager torch")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
