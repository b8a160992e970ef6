"""The check of an export: runs the finished file and the eager modules on the same inputs, and compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...verification.cost import Cost
from ...verification.load import load_methods
from ...verification.noise import RoundingNoise
from ...verification.rounding import compare
from .methods import Method

_NOISY_RUNS = 3
_SPREAD_FACTOR = 16  # the largest of many deviations is compared
_LENGTHS = (7, 33)  # tokens of the longest text of a call, as far as the method takes them
_ROWS = 3


@dataclass(frozen=True)
class EncoderCheck:
    """The result of the check.

    - `difference`, `tolerance`: the largest difference of a value, and its tolerance, in the call that comes closest to
      the tolerance or exceeds it the most.
    - `cosine`: the smallest cosine between a result and that of eager torch.
    - `seconds`: the time of the check; `added_memory`, `peak_before`: as in `ProgramCheck`.
    """

    ok: bool
    method: str
    difference: float
    tolerance: float
    cosine: float
    seconds: float
    added_memory: int
    peak_before: int

    def __str__(self) -> str:
        return (
            f"{self.method}: largest difference {self.difference:.1e}, tolerance {self.tolerance:.1e}; smallest cosine "
            f"{self.cosine:.7f}"
        )

    def cost(self) -> str:
        added = self.added_memory / 1e9
        return (
            f"verify: {self.seconds:.1f} s; peak memory {self.peak_before / 1e9:.2f} GB, the check added {added:.2f} GB"
        )


def check_program(path: Path, methods: Sequence[Method]) -> EncoderCheck:
    """Compare the methods of the file `path` with their eager modules: texts of different lengths, and pictures."""
    cost = Cost()
    functions = load_methods(path, [method.name for method in methods])
    found, cosine = [], 1.0
    with torch.no_grad():
        for method in methods:
            for inputs in example_calls(method):
                expected = method.module(*inputs)
                noisy = []
                for seed in range(_NOISY_RUNS):
                    with RoundingNoise(seed):
                        noisy.append(method.module(*inputs))
                (actual,) = functions[method.name](list(inputs))
                found.append((method.name, compare(actual, expected, noisy, _SPREAD_FACTOR)))
                similar = torch.nn.functional.cosine_similarity(actual.double(), expected.double(), dim=-1)
                cosine = min(cosine, float(similar.min()))
    name, worst = max(found, key=lambda entry: entry[1].excess)
    return EncoderCheck(
        worst.ok, name, worst.difference, worst.tolerance, cosine, cost.seconds, cost.added_memory, cost.peak_before
    )


def example_calls(method: Method) -> list[tuple[torch.Tensor, ...]]:
    """Return inputs of calls. The texts of a call have different lengths."""
    tokens, *others = method.inputs
    if not others or 1 not in method.sizes[0]:
        return [method.inputs]
    rows, longest = tokens.shape[0], method.sizes[0][1][1]
    calls = []
    for length in dict.fromkeys(min(n, longest) for n in _LENGTHS):
        generator = torch.Generator().manual_seed(length)
        ids = torch.randint(0, int(tokens.max()) + 1, (rows, length), generator=generator)
        mask = torch.zeros_like(ids)
        for row in range(rows):
            mask[row, : max(1, length - row * length // rows)] = 1
        calls.append((ids, mask, *(torch.zeros_like(ids) for _ in others[1:])))
    return calls
