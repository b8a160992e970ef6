"""The cost of penalties, logit bias and a mask of allowed tokens.

    python benchmarks/penalties.py [--vocab 151936] [--repeats 101] [--window 64] [--bias 32]

Each call draws a token with top_k 40, through the delegate, from float32 logits [1, V] that are distributed
as in text. Times are medians of the CPU time of this process, because other processes hardly change it.
"more" is the time of the call minus the time of a call that only draws.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time

import torch
from executorch_mlx import SamplingHead
from sampling import lower_and_load, make_logits

DRAW = {"temperature": torch.tensor(1.0), "seed": torch.tensor(0), "top_k": torch.tensor(40)}


class Head(torch.nn.Module):
    """`SamplingHead` on given logits, with the parameters `names` as inputs."""

    def __init__(self, names):
        super().__init__()
        self.head, self.names = SamplingHead(torch.nn.Identity()), names

    def forward(self, logits, *values):
        return self.head(logits, **dict(zip(self.names, values, strict=True)))


def settings(vocabulary: int, window: int, bias: int) -> dict[str, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    words = -(-vocabulary // 32)
    few = torch.zeros(1, words, dtype=torch.int32)
    few[0, :: words // 5] = 1
    penalties = {
        "repetition_penalty": torch.tensor(1.2),
        "presence_penalty": torch.tensor(0.1),
        "frequency_penalty": torch.tensor(0.1),
        "history": torch.randint(vocabulary, (1, window), generator=g),
    }
    biases = {
        "bias_tokens": torch.randint(vocabulary, (bias,), generator=g),
        "bias_values": torch.randn(bias, generator=g),
    }
    everything = {"allowed_tokens": torch.full((1, words), -1, dtype=torch.int32)}
    return {
        "draw": {},
        "penalties": penalties,
        "bias": biases,
        "mask, all allowed": everything,
        "mask, six allowed": {"allowed_tokens": few},
        "all three": penalties | biases | everything,
    }


def microseconds(calls: dict, repeats: int) -> dict[str, float]:
    """The median CPU time of each call. Every round runs all calls."""
    times = {name: [] for name in calls}
    for _ in range(repeats + 3):
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: 1e6 * statistics.median(t[3:]) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocab", type=int, default=151936, help="size of the vocabulary")
    parser.add_argument("--repeats", type=int, default=101, help="measured rounds")
    parser.add_argument("--window", type=int, default=64, help="number of tokens that the penalties count")
    parser.add_argument("--bias", type=int, default=32, help="number of tokens with a bias")
    options = parser.parse_args()

    logits = make_logits("text", options.vocab)
    print(f"V = {options.vocab}, window {options.window}, bias of {options.bias}, float32, B = 1")
    print(f"{'':20} {'us':>7} {'more':>7}")
    calls = {}
    for name, given in settings(options.vocab, options.window, options.bias).items():
        values = DRAW | given
        inputs = [logits, *values.values()]
        calls[name] = functools.partial(lower_and_load(Head(tuple(values)), tuple(inputs), portable=False), inputs)
    cost = microseconds(calls, options.repeats)
    for name, value in cost.items():
        print(f"{name:20} {value:7.0f} {value - cost['draw']:7.0f}")


if __name__ == "__main__":
    main()
