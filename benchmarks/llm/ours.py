"""Measures this delegate. benchmarks/llm.py runs it in its own process.

    python benchmarks/llm/ours.py PROGRAM.pte --prefill 128 512 --context 128 2048 --steps 16

The last line of the output is JSON, with seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from executorch_mlx import Runtime  # noqa: F401  (before `load` starts: peer.py has imported mlx by then, too)
from executorch_mlx.llm.generate.program import LLMProgram
from executorch_mlx.llm.sampling_parameters import SamplingParameters
from process import resident, warm
from programs import measured

PARAMETERS = SamplingParameters(temperature=0.8, top_p=0.9, top_k=40)


class Steps:
    """Timed calls of the program."""

    def __init__(self, path: Path):
        start = time.perf_counter()
        self.program = LLMProgram(path)
        # Loading the method makes the delegate read the weights.
        self.program._program.load_method("forward")
        self.load = time.perf_counter() - start
        self.seed = 0

    def call(self, tokens: torch.Tensor, position: int) -> tuple[int, float]:
        self.seed += 1
        start = time.perf_counter()
        (token,) = self.program.tokens(tokens, position, parameters=PARAMETERS, seed=self.seed)
        return token, time.perf_counter() - start

    def fill(self, prompt: torch.Tensor, position: int = 0) -> tuple[int, float]:
        """Prefill in chunks, as runners do; return the token after the prompt and the seconds."""
        seconds, token = 0.0, 0
        for chunk in prompt.split(self.program.chunk, dim=1):
            token, spent = self.call(chunk, position)
            position, seconds = position + chunk.shape[1], seconds + spent
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
    before = resident()
    steps = Steps(options.program)
    generator = torch.Generator().manual_seed(0)
    longest = max([*options.prefill, *options.context, 1])
    prompt = torch.randint(steps.program.vocab_size, (1, longest), generator=generator)
    result = measured(steps, prompt, options) | {"load": steps.load, "before": before}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
