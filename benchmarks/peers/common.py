"""What the workers of benchmarks/peers_cpu.py have in common."""

import argparse


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--context", type=int, nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def prompt_of(length: int) -> list[int]:
    """Token ids below 500."""
    return [(i * 37 + 11) % 500 for i in range(length)]
