"""Torch operators with a handler of their own: schema, eager kernel, fake kernel.

Importing this module defines the operators in the operator library `mlx`.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
import torch

from .library import define

# Random bits ---------------------------------------------------------------------------

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_BITS_DTYPE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def threefry2x32(key0, key1, x0, x1):
    """Threefry-2x32 with 20 rounds: the two output words for each pair of counters `x0`, `x1` under a key.

    From Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. All operands are NumPy uint32 arrays,
    whose arithmetic wraps around; torch has no uint32 addition on CPU.
    """
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << distance | x1 >> (32 - distance)) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + (group + 1))
    return x0, x1


def key_words(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the key of a 64-bit seed: its upper and its lower 32 bits, each as a uint32 array of one element."""
    return tuple(np.array([word & 0xFFFFFFFF], np.uint32) for word in (seed >> 32, seed))


def _random_bits(shape, seed=None, width=4):
    if width not in _BITS_DTYPE:
        raise ValueError(f"mlx::random_bits: width: got {width}, expected 1, 2 or 4 bytes")
    if seed is not None and (seed.numel() != 1 or seed.dtype != torch.int64):
        raise ValueError(
            f"mlx::random_bits: seed: got {seed.dtype} of shape {list(seed.shape)}, expected one int64"
        )
    count = math.prod(shape)
    words = (count * width + 3) // 4
    first = np.arange((words + 1) // 2, dtype=np.uint32)
    second = first + np.uint32(len(first))
    if words % 2:
        second[-1] = 0  # the last counter of `first` has no partner, so the second output of this pair is dropped
    key = key_words(secrets.randbits(64) if seed is None else int(seed))
    low, high = threefry2x32(*key, first, second)
    drawn = np.concatenate([low, high[: words // 2]]).view(np.uint8)[: count * width]
    return torch.from_numpy(drawn).view(_BITS_DTYPE[width]).reshape(shape)


def _random_bits_fake(shape, seed=None, width=4):
    return torch.empty(shape, dtype=_BITS_DTYPE[width])


# Returns random uint8, uint16 or uint32 of the given shape, for a `width` of 1, 2 or 4 bytes. The bits are those of
# `mlx::core::random::bits` with the key `random::key(seed)`, which uses all 64 bits of the seed. Without a seed, every
# call returns different bits: eager torch takes a random seed, and an MLX program takes the next key of MLX's own
# sequence.
random_bits = define(
    "random_bits(SymInt[] shape, Tensor? seed=None, int width=4) -> Tensor",
    _random_bits,
    _random_bits_fake,
)


# Selection -----------------------------------------------------------------------------


def _argpartition(x, kth, axis=-1):
    return torch.argsort(x, dim=axis)


def _argpartition_fake(x, kth, axis=-1):
    return torch.empty_like(x, dtype=torch.int64)


# Returns int64 indices that partition `x` along `axis`: index `kth` of the result refers to the element that a sort
# would put there, no earlier index refers to a larger element, and no later index refers to a smaller element. The
# order within the two parts is unspecified.
argpartition = define(
    "argpartition(Tensor x, int kth, int axis=-1) -> Tensor",
    _argpartition,
    _argpartition_fake,
)


# Key-value cache ------------------------------------------------------------------------


def _position(name, start):
    if start.numel() != 1 or start.dtype != torch.int64:
        raise ValueError(
            f"mlx::{name}: start: got {start.dtype} of shape {list(start.shape)}, expected one int64"
        )
    if int(start) < 0:
        raise ValueError(f"mlx::{name}: start: got {int(start)}, expected a position from 0")
    return int(start)


def _check_capacity(name, needed, capacity):
    if needed > capacity:
        raise ValueError(f"mlx::{name}: cache: got a capacity of {capacity} positions, expected at least {needed}")


def _cache_update(cache, update, start, ring=False):
    begin, length, capacity = _position("cache_update", start), update.shape[2], cache.shape[2]
    _check_capacity("cache_update", length if ring else begin + length, capacity)
    updated = cache.clone()
    updated[:, :, torch.arange(begin, begin + length) % capacity] = update
    return updated


# Returns a copy of `cache` [B, H, C, D] with `update` [B, H, S, D] written at the positions `start` to `start + S`.
# With `ring`, position p is written at index p % C, and S is at most C. If `cache` is a buffer to which the model
# copies the result, the MLX program updates the buffer in place.
cache_update = define(
    "cache_update(Tensor cache, Tensor update, Tensor start, bool ring=False) -> Tensor",
    _cache_update,
    lambda cache, update, start, ring=False: torch.empty_like(cache),
)


def _cached_attention(query, keys, values, start, scale, first=None, window=None, softcap=None):
    begin, length, capacity = _position("cached_attention", start), query.shape[2], keys.shape[2]
    end = begin + length
    # The window of the first query must still be in the ring buffer.
    oldest = 0 if window is None else max(0, begin - window + 1)
    _check_capacity("cached_attention", end - oldest, capacity)
    filled = min(end, capacity)
    queries = torch.arange(begin, end)[:, None]
    # The position that each entry of the ring buffer holds: the last position that was written to the entry.
    positions = end - 1 - (end - 1 - torch.arange(filled)) % capacity
    mask = positions <= queries
    if window is not None:
        mask = mask & (positions > queries - window)
    if first is not None:
        # A query in the padding attends to itself, because the result of a query that attends to nothing is NaN.
        mask = mask & (positions >= first[:, None, None, None]) | (positions == queries)
    groups = query.shape[1] // keys.shape[1]
    k, v = (
        c[:, :, :filled].to(query.dtype).repeat_interleave(groups, dim=1) for c in (keys, values)
    )
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, k, v, attn_mask=mask, scale=scale
        )
    scores = torch.tanh(query @ k.transpose(2, 3) * (scale / softcap)) * softcap
    return scores.masked_fill(~mask, -torch.inf).float().softmax(-1).to(query.dtype) @ v


# Causal attention of `query` [B, H, S, D] at positions `start` to `start + S` over the caches `keys` and `values`
# [B, G, C, D], which already hold these positions. G divides H. Returns [B, H, S, D].
# `first` [B] int64 is the first position of each sequence; earlier positions are padding.
# With `window`, a query attends to the last `window` positions, including the position of the query, and the caches are
# ring buffers with C >= min(window + S - 1, start + S). With `softcap`, the scores become
# softcap * tanh(scores / softcap).
cached_attention = define(
    "cached_attention(Tensor query, Tensor keys, Tensor values, Tensor start, float scale, "
    "Tensor? first=None, int? window=None, float? softcap=None) -> Tensor",
    _cached_attention,
    lambda query, keys, values, start, scale, first=None, window=None, softcap=None:
        torch.empty_like(query, memory_format=torch.contiguous_format),
)
