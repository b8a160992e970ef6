"""Measures mlx-lm. benchmarks/llm.py runs it in its own process.

    python benchmarks/llm/peer.py FOLDER --prefill 16 --context 128 2048 --steps 4

For decoding after a long context, the cache is filled with random values: a real prefill would take
minutes. The last line of the output is JSON, with seconds and bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model
from process import cache_files, resident

SAMPLER = make_sampler(temp=0.8, top_p=0.9, top_k=40)


def filled_cache(model, length: int):
    """A cache with random keys and values for `length` tokens."""
    cache = make_prompt_cache(model)
    args = model.args
    for layer in cache:
        shape = (1, args.num_key_value_heads, length, args.head_dim)
        layer.state = (mx.random.normal(shape), mx.random.normal(shape), length)
    mx.eval([layer.state[:2] for layer in cache])
    return cache


def token_times(model, prompt, cache, count: int) -> list[float]:
    """Seconds per token in the generation loop of mlx-lm. The first time includes the prompt."""
    times, last = [], time.perf_counter()
    for _ in generate_step(prompt, model, max_tokens=count, sampler=SAMPLER, prompt_cache=cache):
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prefill", type=int, default=0, help="length of the prompt")
    parser.add_argument("--context", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    cache_files(*options.folder.glob("*.safetensors"))
    before = resident()
    start = time.perf_counter()
    model, _ = load_model(options.folder)
    result = {"load": time.perf_counter() - start, "prefill": {}, "decode": {}, "resident": {}}
    mx.random.seed(0)
    if options.prefill:
        prompt = mx.random.randint(0, model.args.vocab_size, (1, options.prefill))
        cache = make_prompt_cache(model)
        start = time.perf_counter()
        mx.eval(model(prompt, cache=cache)[:, -1])
        result["prefill"][options.prefill] = time.perf_counter() - start
    for length in options.context:
        cache = filled_cache(model, length)
        # The loop computes one token ahead: the first time covers two steps.
        times = token_times(model, mx.array([1]), cache, options.steps + 1)
        result["decode"][length] = statistics.median(times[1:])
        result["resident"][length] = resident()
    result["before"] = before
    print(json.dumps(result))


if __name__ == "__main__":
    main()
