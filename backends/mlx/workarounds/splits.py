"""Splits into parts whose first dimension is dynamic, as slices.

ExecuTorch's verifier takes the length of the first part of a split. The length of a tensor is a Python integer, so that
torch makes the first dimension static, with the size of the example. A slice is one tensor, and is verified without
its length.
"""

from __future__ import annotations

import torch
from torch.fx import Node

aten = torch.ops.aten


def _split(x: torch.Tensor, split_size: int | torch.SymInt, dim: int = 0) -> list[torch.Tensor]:
    extent = x.shape[dim]
    full = max(int((extent + split_size - 1) // split_size) - 1, 0)
    return _split_with_sizes(x, [split_size] * full + [extent - full * split_size], dim)


def _split_with_sizes(x: torch.Tensor, split_sizes: list[int | torch.SymInt], dim: int = 0) -> list[torch.Tensor]:
    parts, start = [], 0
    for size in split_sizes:
        parts.append(aten.slice.Tensor(x, dim, start, start + size))
        start += size
    return parts


# Decompositions of the operators that split a tensor.
DECOMPOSITIONS = {
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
}


def has_dynamic_parts(node: Node) -> bool:
    """Whether `node` splits a tensor into parts, and the first dimension of the first part is dynamic."""
    parts = node.meta.get("val")
    returns = node.target._schema.returns if isinstance(node.target, torch._ops.OpOverload) else ()
    splits = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
    return splits and len(parts) > 0 and parts[0].ndim > 0 and isinstance(parts[0].shape[0], torch.SymInt)
