"""Measures this delegate, through the engine. benchmarks/llm.py runs this program in a process of its own.

    python benchmarks/llm/ours.py PROGRAM.pte --prefill 128 512 --context 128 2048 --steps 16

The last line of the output is JSON, with seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path

from executorch_mlx import LLM
from process import cache_files, resident

PARAMETERS = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "ignore_eos": True, "draft": 0}


def prefill(llm: LLM, prompt: list[int]) -> float:
    """The seconds of a prefill, which also draws a token."""
    return llm.generate(prompt, max_new_tokens=1, **PARAMETERS).result().metrics.prompt_seconds


def decode(llm: LLM, prompt: list[int], steps: int) -> float:
    """The median seconds of a decode step after `prompt`."""
    answer = llm.generate(prompt, max_new_tokens=steps + 1, **PARAMETERS)
    ends = [time.perf_counter() for _ in answer]
    return statistics.median(end - begin for begin, end in list(pairwise(ends))[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("program", type=Path)
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="prompt lengths for the times of prefill")
    parser.add_argument(
        "--context", type=int, nargs="*", default=[], help="prompt lengths for the times of decode steps"
    )
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    cache_files(options.program)
    before = resident()
    start = time.perf_counter()
    llm = LLM.load(options.program, reuse_prompts=False)
    result = {"load": time.perf_counter() - start, "before": before, "prefill": {}, "decode": {}, "resident": {}}
    rng = random.Random(0)
    longest = max([*options.prefill, *options.context, 2])
    prompt = [rng.randrange(llm.program.vocab_size) for _ in range(longest)]
    prefill(llm, prompt[:2])  # warm up
    for length in options.prefill:
        result["prefill"][length] = statistics.median(prefill(llm, prompt[:length]) for _ in range(options.repeats))
    for length in options.context:
        result["decode"][length] = decode(llm, prompt[:length], options.steps)
        result["resident"][length] = resident()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
