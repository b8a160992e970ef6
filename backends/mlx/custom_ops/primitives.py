"""Torch operators for what ATen lacks: random bits with a seed, partial sorting, KV caches and state.

Importing this module defines the operators in the operator library `mlx`.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
import torch

from .library import define, differentiate

# Random bits ---------------------------------------------------------------------------

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_BITS_DTYPE = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}


def threefry2x32(key0, key1, x0, x1):
    """Return the two output words of Threefry-2x32 with 20 rounds for each pair of counters `x0`, `x1` under a key.

    From Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. All operands are NumPy uint32 arrays,
    whose arithmetic wraps around; torch has no uint32 addition on CPU.
    """
    keys = (key0, key1, key0 ^ key1 ^ 0x1BD11BDA)
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << distance | x1 >> (32 - distance)) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + (group + 1))
    return x0, x1


def key_words(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the key of a 64-bit seed: its upper and its lower 32 bits, each as a uint32 array of one element."""
    return tuple(np.array([word & 0xFFFFFFFF], np.uint32) for word in (seed >> 32, seed))


def _random_bits(shape, seed=None, width=4):
    if width not in _BITS_DTYPE:
        raise ValueError(f"mlx::random_bits: width: got {width}, expected 1, 2 or 4 bytes")
    if any(size < 0 for size in shape):
        raise ValueError(f"mlx::random_bits: shape: got {list(shape)}, expected sizes of at least 0")
    if seed is not None and (seed.numel() != 1 or seed.dtype != torch.int64):
        raise ValueError(f"mlx::random_bits: seed: got {seed.dtype} of shape {list(seed.shape)}, expected one int64")
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
    "random_bits(SymInt[] shape, Tensor? seed=None, int width=4) -> Tensor", _random_bits, _random_bits_fake
)


# Selection -----------------------------------------------------------------------------


def _argpartition(x, kth, axis=-1):
    return torch.argsort(x, dim=axis)


def _argpartition_fake(x, kth, axis=-1):
    return torch.empty_like(x, dtype=torch.int64)


# Returns int64 indices that partition `x` along `axis`: index `kth` of the result refers to the element that a sort
# would put there, no earlier index refers to a larger element, and no later index refers to a smaller element. The
# order within the two parts is unspecified.
argpartition = define("argpartition(Tensor x, int kth, int axis=-1) -> Tensor", _argpartition, _argpartition_fake)


# Key-value cache ------------------------------------------------------------------------


def _positions_and_row_begins(name, cache, start, row, rows, length, ring):
    """Return the position of each of `length` tokens, and the index on axis 2 of `cache` at which its row begins.

    Both are int64 `[length]`. Raises ValueError if a position or a row is out of range.
    """
    capacity = cache.shape[2] // rows
    has_one_start = start.numel() == 1
    for argument, values in {"start": start, "row": row}.items():
        if values is not None and (values.dtype != torch.int64 or values.dim() > 1 or values.numel() != start.numel()):
            raise ValueError(
                f"mlx::{name}: {argument}: got {values.dtype} of shape {list(values.shape)}, expected int64 of shape "
                f"[1] or [{length}], the same for start and row"
            )
    if (row is None) != (rows == 1) or cache.shape[2] % rows or start.numel() not in (1, length):
        raise ValueError(
            f"mlx::{name}: got start {list(start.shape)}, {'no row' if row is None else 'row'}, {rows} rows and a "
            f"cache {list(cache.shape)}, expected start of shape [1] or [{length}], and row if there are several rows"
        )
    positions = start.reshape(-1) + torch.arange(length if has_one_start else 1)
    if int(positions.min()) < 0:
        raise ValueError(f"mlx::{name}: start: got {int(positions.min())}, expected a position from 0")
    if not ring:
        _check_capacity(name, int(positions.max()) + 1, capacity)
    chosen = torch.zeros(1, dtype=torch.int64) if row is None else row.reshape(-1)
    if not 0 <= int(chosen.min()) <= int(chosen.max()) < rows:
        raise ValueError(f"mlx::{name}: row: got {chosen.tolist()}, expected rows in [0, {rows})")
    return positions, (chosen * capacity).expand(length)


def _check_capacity(name, needed, capacity):
    if needed > capacity:
        raise ValueError(f"mlx::{name}: cache: got a capacity of {capacity} positions, expected at least {needed}")


def _cache_update(cache, update, start, ring=False, row=None, rows=1):
    length, capacity = update.shape[2], cache.shape[2] // rows
    positions, row_begins = _positions_and_row_begins("cache_update", cache, start, row, rows, length, ring)
    if start.numel() == 1:
        _check_capacity("cache_update", length, capacity)
    updated = cache.clone()
    updated[:, :, row_begins + positions % capacity] = update
    return updated


# Returns a copy of `cache` [1, G, rows * L, D] with `update` [1, G, S, D] written to it. A row holds L positions:
# position p of row r is at index r * L + p, or at r * L + p % L with `ring`. There are two forms:
#
# - `start` [1], `row` [1]: writes the positions `start` to `start + S` of a row. S is at most L.
# - `start` [S], `row` [S]: writes one position of each of S rows. If two of them name the same position of the same
#   row, the later one counts.
#
# `row` is None if there is one row. If `cache` is a buffer to which the model copies the result, the MLX program
# updates the buffer in place.
cache_update = define(
    "cache_update(Tensor cache, Tensor update, Tensor start, bool ring=False, Tensor? row=None, int rows=1) -> Tensor",
    _cache_update,
    lambda cache, update, start, ring=False, row=None, rows=1: torch.empty_like(cache),
)


def cached_attention_in_torch(
    query,
    keys,
    values,
    start,
    scale,
    window=None,
    softcap=None,
    row=None,
    rows=1,
    blocks=False,
    sinks=None,
    slopes=None,
):
    length = query.shape[2]
    _positions_and_row_begins("cached_attention", keys, start, row, rows, length, window is not None)
    if blocks and window is None:
        raise ValueError("mlx::cached_attention: blocks: got no window, expected the size of the blocks as window")
    for argument, values_of_heads in {"sinks": sinks, "slopes": slopes}.items():
        if values_of_heads is not None and values_of_heads.shape != query.shape[1:2]:
            raise ValueError(
                f"mlx::cached_attention: {argument}: got shape {list(values_of_heads.shape)}, expected "
                f"[{query.shape[1]}], a number for each query head"
            )
    has_one_start = start.numel() == 1
    results = []
    for index in range(start.numel()):
        queries = query if has_one_start else query[:, :, index : index + 1]
        chosen = 0 if row is None else int(row.reshape(-1)[index])
        k, v = (c.unflatten(2, (rows, -1))[:, :, chosen] for c in (keys, values))
        begin = int(start.reshape(-1)[index])
        results.append(_attend(queries, k, v, begin, scale, window, softcap, blocks, sinks, slopes))
    return torch.cat(results, 2)


def _attend(query, keys, values, begin, scale, window, softcap, blocks, sinks, slopes):
    """Return the attention of `query` [1, H, S, D] over a row `keys` and `values` [1, G, L, D].

    The queries are at the positions from `begin` on.
    """
    length, capacity = query.shape[2], keys.shape[2]
    end = begin + length
    # The ring buffer must still hold all positions to which the first query attends.
    oldest = 0 if window is None else begin - begin % window if blocks else max(0, begin - window + 1)
    _check_capacity("cached_attention", end - oldest, capacity)
    filled = min(end, capacity)
    queries = torch.arange(begin, end, dtype=torch.int32)
    mask = attention_mask(queries, slopes, filled, capacity, window, blocks, query.dtype)
    k, v = (c[:, :, :filled].to(query.dtype) for c in (keys, values))
    if softcap is None and sinks is None:
        options = {"scale": scale, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(query, k, v, attn_mask=mask, **options)
    return composed_attention(query, k, v, mask, sinks, scale, softcap)


def attention_mask(queries, slopes, num_held, capacity, window, blocks, dtype):
    """Return the mask of queries at the positions `queries`, int32 [S], which follow each other.

    Without `slopes`, the mask is bool [S, num_held]: whether a query attends to an index of the row. With slopes, it
    has the numbers to add to the scores, [H, S, num_held] of `dtype`. The mask covers the first `num_held` indices of
    the row. With a window, the row is a ring buffer of `capacity` positions.
    """
    queries = queries[:, None]
    keys = torch.arange(num_held, dtype=torch.int32)
    if window is not None:  # an index of a ring buffer holds the last position that was written to it
        last = queries[-1]
        keys = last - (last - keys) % capacity
    mask = keys <= queries
    if window is not None:
        mask = torch.logical_and(mask, keys > (queries - (queries % window + 1) if blocks else queries - window))
    if slopes is None:
        return mask
    bias = slopes.float()[:, None, None] * (keys - queries).float()
    return torch.where(mask, bias.to(dtype), -torch.inf)


def composed_attention(query, k, v, mask, sinks, scale, softcap):
    """Return the attention of `query` [1, H, S, D] over `k` [1, G, N, D] and `v` [1, G, N, E].

    Unlike torch's, it has a soft cap or sinks. `mask` is one that `attention_mask` returns. Query heads that share a
    key head are stacked in one matrix, so that the keys need not be repeated.
    """
    k, v = k.squeeze(0), v.squeeze(0)
    _, heads, length, size = query.shape
    groups, num_held = k.shape[:2]
    stacked = (groups, heads // groups * length)
    scores = (query.reshape(*stacked, size) @ k.mT).reshape(1, heads, length, num_held)
    scores = scores * (scale / (softcap or 1))
    if softcap is not None:
        scores = torch.tanh(scores) * softcap
    scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(1, heads, length, 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)
    if sinks is not None:
        weights = weights[..., :num_held]
    return (weights.reshape(*stacked, num_held) @ v).reshape(1, heads, length, v.shape[2])


# Causal attention of `query` [1, H, S, D] over the caches `keys` [1, G, rows * L, D] and `values` [1, G, rows * L, E],
# which already hold the positions of the queries. G divides H. `start` and `row` are as in `cache_update`: the queries
# are at the positions `start` to `start + S` of one row, or each is at a position of a row of its own. A query attends
# only to its row. Returns [1, H, S, E].
#
# With `window`, a query attends to the last `window` positions, including the position of the query, and the rows are
# ring buffers with L >= min(window + S - 1, start + S); S counts the queries of a row. With `blocks`, the query
# at position q attends only to its own block: to positions p with p // window == q // window. With `softcap`, the
# scores become softcap * tanh(scores / softcap). `slopes` [H] adds slope * (key position - query position) to the
# scores. `sinks` [H] adds a score to the softmax that belongs to no key.
cached_attention = define(
    "cached_attention(Tensor query, Tensor keys, Tensor values, Tensor start, float scale, "
    "int? window=None, float? softcap=None, Tensor? row=None, int rows=1, bool blocks=False, Tensor? sinks=None, "
    "Tensor? slopes=None) -> Tensor",
    cached_attention_in_torch,
    lambda query, keys, values, *settings, **options: query.new_empty((*query.shape[:3], values.shape[3])),
)


# State ------------------------------------------------------------------------------------


# Returns a copy of `buffer`, for a method that reads a buffer and leaves the writing to another method. The module
# copies the result to the buffer, which makes the buffer mutable in this method too and adds no instruction to the MLX
# program. Methods that are lowered together do not need this: they share a buffer that one of them writes.
#
#     state = torch.ops.mlx.read_state(self.buffer)
#     self.buffer.copy_(state)
read_state = define("read_state(Tensor buffer) -> Tensor", torch.Tensor.clone, torch.empty_like)


# Order of computation --------------------------------------------------------------------


def _after(x, other):
    return x.clone()


def _after_fake(x, other):
    return torch.empty_like(x)


# Returns `x`. A program computes what reads the result once more, although it has computed the same from `x` itself,
# and not before `other` is computed. `training.recompute` uses the operator for gradient checkpointing.
after = define("after(Tensor x, Tensor other) -> Tensor", _after, _after_fake)
differentiate(after, lambda context, grad: (grad, None), lambda context, inputs: None)
