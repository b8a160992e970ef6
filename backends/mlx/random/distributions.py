"""Maps random 32-bit words to other distributions, in torch.

`words` are uint32, as `mlx::random_bits` returns them. `exponential`, `normal` and `race` use functions that a device
may round differently (logarithm and cosine). The results of the other functions are exact.
"""

from __future__ import annotations

import math

import torch

# The size of the significand, in bits.
SIGNIFICAND = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(words, dtype):
    """Return numbers in [0, 1), those of `mlx.core.random.uniform` for the same words."""
    below_one = 1 - 2.0 ** -SIGNIFICAND[dtype]
    return (words.to(torch.float32) * 2.0**-32).clamp(max=below_one).to(dtype)


def largest_below(value, dtype):
    """Return the largest number of `dtype` that is below `value`, both as Python floats."""
    limits = torch.finfo(dtype)
    smallest = limits.tiny * limits.eps  # the distance of the numbers around 0
    mantissa, exponent = math.frexp(value)
    distance = 2.0 ** (exponent - SIGNIFICAND[dtype] - (mantissa == 0.5))  # half as far below a power of 2
    distance = max(distance, smallest) if value else smallest
    return (math.ceil(value / distance) - 1) * distance


def exponential(words):
    """Return exponentially distributed float32 numbers, none of which is 0."""
    # 2^32 - 256 is the largest float32 number below 2^32, whose logarithm would give 0.
    return -torch.log((words.to(torch.float32) + 0.5).clamp(max=2.0**32 - 256) * 2.0**-32)


def normal(words, dtype):
    """Return normally distributed numbers `[*size]` from words `[2, *size]`, by the Box-Muller transform."""
    radius = torch.sqrt(2 * exponential(words[0]))
    return (radius * torch.cos(2 * math.pi * uniform(words[1], torch.float32))).to(dtype)


def integers(words, low, high, dtype):
    """Return integers in [low, high). Their probabilities differ by at most 2^-32."""
    # A range that depends on a dynamic size is not checked: the check would restrict the size.
    if isinstance(high - low, int) and not 0 < high - low <= 1 << 31:
        raise ValueError(f"randint: got the range [{low}, {high}), expected 1 to 2^31 numbers")
    return (torch.floor_divide(words.to(torch.int64) * (high - low), 1 << 32) + low).to(dtype)


def permutation(words, dtype):
    """Return a permutation of 0 to n - 1 from n words."""
    return torch.sort(words.to(torch.int64), stable=True).indices.to(dtype)


def race(words, weights, count):
    """Return the first `count` indices, int64 `[..., count]`, in an exponential race with `weights` `[..., V]`.

    Index v arrives after an exponentially distributed time, divided by weight v. The first index is therefore drawn
    with probabilities proportional to the weights. Each further index is drawn in this way from the remaining indices.
    """
    # Near 0, where the races are decided, `-log1p(-u)` has more distinct values than `-log(u)`.
    times = -torch.log1p(-((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24))
    # With weights of at most 1, the quotients cannot overflow.
    weights = weights / weights.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if isinstance(count, int) and count == 1:
        return (weights / times).argmax(-1, keepdim=True)
    return torch.sort(-weights / times, dim=-1, stable=True).indices[..., :count]
