"""What the workers of benchmarks/peers_cpu.py have in common."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--format", default="float32", help="weights and activations, for engines that choose at load")
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--context", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def prompt_of(length: int) -> list[int]:
    """Token ids below 500."""
    return [(i * 37 + 11) % 500 for i in range(length)]


def positions(options: argparse.Namespace) -> int:
    """The positions of the KV cache that the measurements need."""
    return max([*options.prefill, *options.context]) + options.steps + 16


def report(
    options: argparse.Namespace, prefill: Callable[[int], float], decode: Callable[[int, int], list[float]]
) -> None:
    """Measure an engine. Print a line of JSON: for `prefill` and `decode`, the seconds by length of the prompt.

    `prefill(length)` returns the seconds from an empty cache to the first token. `decode(length, steps)` returns the
    seconds of each decode step after a prompt.
    """
    prefill(2)  # warm up
    result = {
        "prefill": {n: min(prefill(n) for _ in range(options.repeats)) for n in options.prefill},
        "decode": {n: statistics.median(decode(n, options.steps)) for n in options.context},
    }
    print(json.dumps(result))
