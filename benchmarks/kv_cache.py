"""Decode speed of programs with different KV caches, at the same position.

    python benchmarks/kv_cache.py float.pte kv8.pte kv4.pte [--position 2048] [--tokens 16] [--rounds 12]

Make the programs from one model with `executorch-mlx export`, with and without `--kv-bits`. The programs get the same
prompt of random tokens. In each of `rounds` rounds, they decode a few tokens in turn, so that other load on the machine
affects all of them. `ms` is the median over the rounds of the time per token, and `fastest` the shortest time. `ratio`
is the speed relative to the first program in the same round, as the median over the rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path


def main() -> None:
    from executorch_mlx import LLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="+", type=Path)
    parser.add_argument("--position", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16, help="tokens per measurement")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    prompt = [random.Random(0).randrange(100, 1000) for _ in range(options.position)]
    models = [LLM.load(path) for path in options.programs]
    times: list[list[float]] = [[] for _ in models]
    prefills = []
    for model in models:
        started = time.perf_counter()
        model.generate(prompt, max_new_tokens=1, ignore_eos=True, draft=0).result()
        prefills.append(time.perf_counter() - started)
    for _ in range(options.rounds):
        for model, measured in zip(models, times):
            answer = model.generate(prompt, max_new_tokens=options.tokens + 1, ignore_eos=True, draft=0)
            next(answer)  # takes only one call, because the KV cache has the prompt already
            started = time.perf_counter()
            for _ in answer:
                pass
            measured.append((time.perf_counter() - started) / options.tokens)
    print(f"{'program':24} {'prefill s':>10} {'ms':>8} {'fastest':>8} {'ratio':>7}")
    for path, prefill, measured in zip(options.programs, prefills, times):
        ratio = statistics.median(a / b for a, b in zip(times[0], measured))
        median, fastest = statistics.median(measured) * 1e3, min(measured) * 1e3
        print(f"{path.name:24} {prefill:10.2f} {median:8.2f} {fastest:8.2f} {ratio:7.3f}")


if __name__ == "__main__":
    main()
