"""`mlx::random_bits_at`: some words of `mlx::random_bits`, without drawing them all.

    random_bits_at(index, count, seed) == random_bits([count], seed)[index]
"""

from __future__ import annotations

import torch

from ..custom_ops import define, threefry2x32

# The chain for a handful of words costs about as much as drawing this many (MLX on a CPU,
# 2.5 us for an operation on a small array against 4.7 ns for a word).
_DENSE = 1 << 16


def random_bits_at_reference(index, count, seed):
    """The text that lowering traces: threefry in uint32 arithmetic on the words of `index`."""
    if count <= _DENSE:
        return torch.ops.mlx.random_bits([count], seed)[index]
    pairs = (count + 1) // 2
    index = index.to(torch.uint32)
    first = torch.remainder(index, pairs)
    second = first + pairs
    if count % 2:  # the middle word has no partner
        second = second * (first != pairs - 1)
    # As an unsigned number: a division that rounds down, on MLX too.
    high = seed.to(torch.uint64) // (1 << 32)
    out0, out1 = threefry2x32(high.to(torch.uint32), seed.to(torch.uint32), first, second)
    return torch.where(index < pairs, out0, out1)


def _eager(index, count, seed):
    # torch indexes int32 but not uint32 on CPU.
    return torch.ops.mlx.random_bits([count], seed).view(torch.int32)[index].view(torch.uint32)


def _fake(index, count, seed):
    return torch.empty_like(index, dtype=torch.uint32)


# `index` int64 below `count`, of any shape; `seed` one int64. Returns uint32 of index's shape.
random_bits_at = define(
    "random_bits_at(Tensor index, SymInt count, Tensor seed) -> Tensor", _eager, _fake
)

COMPOSITES = {random_bits_at: random_bits_at_reference}
