"""Random functions with a seed: torch's functions of the same names, computed from `mlx::random_bits`."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import torch

from .. import custom_ops  # noqa: F401  (defines torch.ops.mlx.random_bits)
from . import distributions

Seed: TypeAlias = SupportsIndex | torch.Tensor | None


def rand(size: Sequence[int], *, seed: Seed = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return uniform numbers in [0, 1), of shape `size` and of dtype float32, float16 or bfloat16.

    The numbers are those of `mlx.core.random.uniform(shape=size, dtype=dtype, key=mlx.core.random.key(seed))`, on every
    device. `seed` is an int, or a tensor with one int64. Under `torch.export`, a seed that is an input of the model
    becomes an input of the program. The same seed gives the same numbers, so the caller passes another seed in every
    call. Without a seed, every call gives other numbers.

    Raises ValueError for another dtype, and if the seed is no int of 64 bits.
    """
    _check_floating("rand", dtype)
    return distributions.uniform(random_words(size, seed), dtype)


def randn(size: Sequence[int], *, seed: Seed = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers with mean 0 and variance 1. The arguments are those of `rand`.

    The random bits are the same on every device. The logarithm and the cosine, with which they become normally
    distributed, may differ in the last bits.
    """
    _check_floating("randn", dtype)
    return distributions.normal(random_words([2, *size], seed), dtype)


def randint(
    low: int, high: int, size: Sequence[int], *, seed: Seed = None, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return integers in [low, high), of shape `size`. `seed` is that of `rand`.

    `low` and `high` are constants of a program. Raises ValueError for a range of more than 2^31 numbers, and for
    numbers that an integer `dtype` cannot hold.
    """
    for name, bound in {"low": low, "high": high}.items():
        if not isinstance(bound, (int, torch.SymInt)):
            raise ValueError(f"randint: {name}: got {bound!r}, expected an int")
    if isinstance(low, int) and isinstance(high, int) and not dtype.is_floating_point:
        _check_fits("randint", low, high - 1, dtype)
    return distributions.integers(random_words(size, seed), low, high, dtype)


def randperm(n: int, *, seed: Seed = None, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a random permutation of the integers 0 to n - 1. `seed` is that of `rand`.

    Raises ValueError if `n` is negative, or if `dtype` cannot hold n - 1.
    """
    if isinstance(n, int):
        if n < 0:
            raise ValueError(f"randperm: n: got {n}, expected at least 0")
        _check_fits("randperm", 0, n - 1, dtype)
    return distributions.permutation(random_words([n], seed), dtype)


def bernoulli(p: torch.Tensor, *, seed: Seed = None) -> torch.Tensor:
    """Return 1 with probability `p`, else 0, for each element of `p`, in its dtype. `seed` is that of `rand`."""
    return (rand(p.shape, seed=seed) < p).to(p.dtype)


def dropout(x: torch.Tensor, p: float = 0.5, *, seed: Seed = None) -> torch.Tensor:
    """Set each element of `x` to 0 with probability `p`, and divide the others by 1 - p. `seed` is that of `rand`.

    Raises ValueError if `p` is not a number from 0 to 1.
    """
    if isinstance(p, (int, float)) and not 0 <= p <= 1:
        raise ValueError(f"dropout: p: got {p}, expected 0 to 1")
    return dropout_and_mask(x, p, seed=seed)[0]


def multinomial(
    weights: torch.Tensor, num_samples: int, replacement: bool = False, *, seed: Seed = None
) -> torch.Tensor:
    """Draw indices with probabilities proportional to `weights` `[V]` or `[B, V]`.

    The result is int64 `[num_samples]` or `[B, num_samples]`. The weights are floating-point numbers of any sum, none
    of which is negative. `seed` is that of `rand`.

    Without `replacement`, no index is drawn twice. An index of weight 0 is drawn only if `num_samples` is larger than
    the number of the other indices. To draw one token from logits, `mlx::sample` is faster.

    Raises ValueError if there are no weights, and if `num_samples` is not positive, or, without `replacement`, larger
    than V.
    """
    if weights.dim() == 0 or weights.shape[-1] == 0:
        raise ValueError(f"multinomial: weights: got shape {list(weights.shape)}, expected [V] or [B, V], V >= 1")
    size = weights.shape[-1]
    static = isinstance(num_samples, int) and isinstance(size, int)  # torch.export checks dynamic sizes
    if static and not 1 <= num_samples <= (num_samples if replacement else size):
        expected = "1 or more" if replacement else f"1 to {size}"
        raise ValueError(f"multinomial: num_samples: got {num_samples}, expected {expected}")
    weights = weights.to(torch.float32)
    if not replacement:
        return distributions.race(random_words(weights.shape, seed), weights, num_samples)
    words = random_words([*weights.shape[:-1], num_samples, size], seed)
    return distributions.race(words, weights.unsqueeze(-2), 1).squeeze(-1)


def dropout_and_mask(x, p, *, seed=None):
    """Return the result of `dropout`, and where elements of `x` were kept."""
    kept = rand(x.shape, seed=seed) >= p
    scale = 1 / (1 - p) if p < 1 else 0.0
    return (x.to(torch.float32) * kept * scale).to(x.dtype), kept


def random_words(size, seed):
    return torch.ops.mlx.random_bits(size, _seed_tensor(seed))


def _seed_tensor(seed: Seed) -> torch.Tensor | None:
    if seed is None or (isinstance(seed, torch.Tensor) and seed.dtype == torch.int64 and seed.numel() == 1):
        return seed
    if isinstance(seed, numbers.Integral) and -(2**63) <= int(seed) < 2**64:
        seed = int(seed)
        return torch.full((), seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64)
    got = f"{seed.dtype} of shape {list(seed.shape)}" if isinstance(seed, torch.Tensor) else repr(seed)
    raise ValueError(f"seed: got {got}, expected an int of 64 bits or one int64")


def _check_floating(function: str, dtype: torch.dtype) -> None:
    if dtype not in distributions.SIGNIFICAND:
        raise ValueError(f"{function}: dtype: got {dtype}, expected float32, float16 or bfloat16")


def _check_fits(function: str, lowest: int, highest: int, dtype: torch.dtype) -> None:
    """Raise ValueError if `dtype` cannot hold all integers from `lowest` to `highest`."""
    if dtype == torch.bool:
        low, high = 0, 1
    elif dtype.is_floating_point:
        high = int(2 / torch.finfo(dtype).eps)
        low = -high
    else:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if lowest < low or highest > high:
        raise ValueError(f"{function}: dtype: got {dtype}, expected one that holds {lowest} to {highest}")
