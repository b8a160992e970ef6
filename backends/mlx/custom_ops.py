"""Torch operators that are IR primitives: schema, eager kernel, fake kernel.

Importing this module defines them in the operator library `mlx`.
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Callable

import numpy as np
import torch

_LIBRARY = torch.library.Library("mlx", "FRAGMENT")


def define(schema: str, eager: Callable, fake: Callable) -> torch._ops.OpOverload:
    """Define `mlx::<schema>` with its kernels and return its default overload.

    Raises ImportError if somebody else has defined the name in this process.
    """
    name = schema[: schema.index("(")]
    if f"mlx::{name}" in torch._C._dispatch_get_all_op_names():
        origin = torch._C._dispatch_dump(f"mlx::{name}").partition("debug: ")[2].partition("\n")[0]
        raise ImportError(
            f"executorch_mlx: torch operator mlx::{name} already exists ({origin}). Another MLX "
            "delegate is loaded in this process, probably executorch.backends.mlx of the "
            "executorch wheel; import only one of the two."
        )
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mlx::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mlx, name).default


# Random bits ---------------------------------------------------------------------------

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_BITS_DTYPE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}
_unseeded = (secrets.randbits(63) + i for i in itertools.count())


def threefry2x32(key0, key1, x0, x1):
    """Threefry-2x32, 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC'11): the two output words of the counters `x0`, `x1` under the key.

    All are uint32 arrays of NumPy, whose arithmetic wraps; torch has no uint32 addition on CPU.
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
    """The key of a 64-bit seed: its high and its low word, as uint32 arrays of one element."""
    return tuple(np.array([word & 0xFFFFFFFF], np.uint32) for word in (seed >> 32, seed))


def _random_bits(shape, seed=None, width=4):
    if width not in _BITS_DTYPE:
        raise ValueError(f"mlx::random_bits: width is {width}, expected 1, 2 or 4 bytes")
    if seed is not None and (seed.numel() != 1 or seed.dtype != torch.int64):
        raise ValueError(
            f"mlx::random_bits: seed is {seed.dtype} of shape {list(seed.shape)}, "
            "expected one int64"
        )
    count = math.prod(shape)
    words = (count * width + 3) // 4
    first = np.arange((words + 1) // 2, dtype=np.uint32)
    second = first + np.uint32(len(first))
    if words % 2:
        second[-1] = 0  # the middle word has no partner: its counters are (words // 2, 0)
    key = key_words(next(_unseeded) if seed is None else int(seed))
    low, high = threefry2x32(*key, first, second)
    drawn = np.concatenate([low, high[: words // 2]]).view(np.uint8)[: count * width]
    return torch.from_numpy(drawn).view(_BITS_DTYPE[width]).reshape(shape)


def _random_bits_fake(shape, seed=None, width=4):
    return torch.empty(shape, dtype=_BITS_DTYPE[width])


# uint8, uint16 or uint32 by `width`: the bits of mlx.core's `random::bits` for the key of
# `seed`, all 64 bits of it. Without a seed every call draws anew, on the host from a sequence
# of this process, in a program from MLX's own: those two differ.
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


# int64 indices that put the `kth` smallest element of `axis` in its place, nothing larger
# before and nothing smaller after it. The order within the two parts is not specified.
argpartition = define(
    "argpartition(Tensor x, int kth, int axis=-1) -> Tensor",
    _argpartition,
    _argpartition_fake,
)


# Key-value cache ------------------------------------------------------------------------


def _position(name, start):
    if start.numel() != 1 or start.dtype != torch.int64:
        raise ValueError(
            f"mlx::{name}: start is {start.dtype} of shape {list(start.shape)}, expected one int64"
        )
    return int(start)


def _check_rows(name, first, last, capacity):
    if first < 0 or last > capacity:
        raise ValueError(
            f"mlx::{name}: rows {first} to {last} are outside a cache of {capacity}"
        )


def _cache_update(cache, update, start, ring=False):
    first, length, capacity = _position("cache_update", start), update.shape[2], cache.shape[2]
    if ring:
        _check_rows("cache_update", min(first, 0), length, capacity)
    else:
        _check_rows("cache_update", first, first + length, capacity)
    updated = cache.clone()
    updated[:, :, torch.arange(first, first + length) % capacity] = update
    return updated


# `cache` [B, H, C, D] with `update` [B, H, S, D] for the positions `start` to `start + S`, which
# are rows of the cache; those of a ring are rows modulo C, S at most C. Copied back into the
# buffer it came from, the update is made in place.
cache_update = define(
    "cache_update(Tensor cache, Tensor update, Tensor start, bool ring=False) -> Tensor",
    _cache_update,
    lambda cache, update, start, ring=False: torch.empty_like(cache),
)


def _cached_attention(query, keys, values, start, scale, first=None, window=None, softcap=None):
    begin, length, capacity = _position("cached_attention", start), query.shape[2], keys.shape[2]
    end = begin + length
    # A ring still holds what the first of these queries sees.
    overwritten = 0 if window is None else max(0, begin - window + 1)
    _check_rows("cached_attention", begin, end - overwritten, capacity)
    rows = min(end, capacity)
    asking = torch.arange(begin, end)[:, None]
    # The position that each row holds: the last one that falls on it.
    held = end - 1 - (end - 1 - torch.arange(rows)) % capacity
    mask = held <= asking
    if window is not None:
        mask = mask & (held > asking - window)
    if first is not None:
        # Padding sees itself: a query that sees nothing would be NaN for all that follows.
        mask = mask & (held >= first[:, None, None, None]) | (held == asking)
    groups = query.shape[1] // keys.shape[1]
    k, v = (
        c[:, :, :rows].to(query.dtype).repeat_interleave(groups, dim=1) for c in (keys, values)
    )
    if softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, k, v, attn_mask=mask, scale=scale
        )
    scores = torch.tanh(query @ k.transpose(2, 3) * (scale / softcap)) * softcap
    return scores.masked_fill(~mask, -torch.inf).float().softmax(-1).to(query.dtype) @ v


# Causal attention of `query` [B, H, S, D], which stands at position `start`, over the caches
# `keys` and `values` [B, G, C, D], already updated; G divides H. Returns [B, H, S, D].
# `first` [B] int64: the first position of each row that counts, what is before it is padding.
# `window`: a query sees that many positions, its own included, and the caches are rings of
# C >= min(window + S - 1, start + S) rows. `softcap`: scores become c * tanh(scores / c).
cached_attention = define(
    "cached_attention(Tensor query, Tensor keys, Tensor values, Tensor start, float scale, "
    "Tensor? first=None, int? window=None, float? softcap=None) -> Tensor",
    _cached_attention,
    lambda query, keys, values, start, scale, first=None, window=None, softcap=None:
        torch.empty_like(query, memory_format=torch.contiguous_format),
)
