"""Lowers `mlx::random_bits`, the only random operator, to `RandomBitsNode`."""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY
from ..serialization import ir


@REGISTRY.lower(torch.ops.mlx.random_bits.default)
def random_bits(P, shape, seed=None, width=4):
    return P.emit(
        ir.RandomBitsNode,
        shape=shape,
        seed=None if seed is None else P.item(seed),
        width=width,
        dtype=P.out.dtype,
    )
