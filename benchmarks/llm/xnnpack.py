"""Measures ExecuTorch's XNNPACK delegate. benchmarks/llm.py runs it in its own process.

    python benchmarks/llm/xnnpack.py PROGRAM.pte --prefill 128 512 --context 128 --steps 16

xnnpack_model.py exports the program. It returns logits; the host draws with temperature 0.8, top_k 40
and top_p 0.9. The last line of the output is JSON, with seconds, bytes and threads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  (registers attention and caches)
from executorch.extension.pybindings import portable_lib
from executorch.kernels import quantized  # noqa: F401  (registers the 8-bit embedding)
from executorch.runtime import Runtime
from process import cache_files, resident
from programs import measured

CHUNK = 512  # as in xnnpack_model.py, whose imports would add to the memory here


def draw(logits: torch.Tensor) -> int:
    """Draw a token from logits `[V]`. top_k comes first, so that top_p sorts only 40 values."""
    top, tokens = (logits / 0.8).topk(40)
    odds = top.softmax(-1)
    odds[odds.cumsum(-1) - odds >= 0.9] = 0
    return int(tokens[torch.multinomial(odds, 1)])


class Steps:
    """Timed calls of the program."""

    def __init__(self, path: Path):
        start = time.perf_counter()
        self.program = Runtime.get().load_program(path)
        self.method = self.program.load_method("forward")
        self.load = time.perf_counter() - start

    def call(self, tokens: torch.Tensor, position: int) -> tuple[int, float]:
        start = time.perf_counter()
        positions = torch.arange(position, position + tokens.shape[1])
        (logits,) = self.method.execute([tokens, positions])
        token = draw(logits[0, -1])
        return token, time.perf_counter() - start

    def fill(self, prompt: torch.Tensor) -> tuple[int, float]:
        seconds, position, token = 0.0, 0, 0
        for chunk in prompt.split(CHUNK, dim=1):
            token, spent = self.call(chunk.contiguous(), position)
            position, seconds = position + chunk.shape[1], seconds + spent
        return token, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--context", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cache_files(options.program)
    before = resident()
    steps = Steps(options.program)
    torch.manual_seed(0)
    prompt = torch.randint(options.vocabulary, (1, max([*options.prefill, *options.context, 2])))
    result = measured(steps, prompt, options)
    result |= {"load": steps.load, "before": before, "threads": portable_lib._threadpool_get_thread_count()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
