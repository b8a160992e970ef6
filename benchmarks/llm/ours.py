"""Ours, in a process of its own; the driver is benchmarks/llm.py.

    python benchmarks/llm/ours.py PROGRAM.pte --prefill 128 512 --context 128 2048 --steps 16

The last line is JSON: seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from executorch_mlx import load_delegate
from executorch_mlx.llm.program import LLMProgram
from process import resident, warm
from programs import measured

SCALARS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}


class Steps:
    """Calls of the program's one method, timed."""

    def __init__(self, path: Path):
        start = time.perf_counter()
        self.program = LLMProgram(path)
        # The delegate reads its weights when the method is loaded.
        self.program._program.load_method("forward")
        self.load = time.perf_counter() - start
        self.seed = 0

    def call(self, tokens: torch.Tensor, position: int) -> tuple[int, float]:
        self.seed += 1
        start = time.perf_counter()
        scalars = SCALARS | {"seed": self.seed}
        (token,) = self.program.tokens(tokens, position, scalars=scalars)
        return token, time.perf_counter() - start

    def fill(self, prompt: torch.Tensor, position: int = 0) -> tuple[int, float]:
        """In pieces, as runners do; the token after the prompt and the seconds."""
        seconds, token = 0.0, 0
        for piece in prompt.split(self.program.max_seq_len, dim=1):
            token, spent = self.call(piece, position)
            position, seconds = position + piece.shape[1], seconds + spent
        return token, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--context", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    warm(options.program)
    load_delegate()  # the libraries, as mlx-lm's process has imported mlx
    before = resident()
    steps = Steps(options.program)
    generator = torch.Generator().manual_seed(0)
    longest = max([*options.prefill, *options.context, 1])
    prompt = torch.randint(steps.program.vocab_size, (1, longest), generator=generator)
    result = measured(steps, prompt, options) | {"load": steps.load, "before": before}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
