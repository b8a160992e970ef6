"""The range of a dynamic dimension."""

from __future__ import annotations

import torch


def bounds(extent: int | torch.SymInt) -> tuple[int, int | None]:
    """Returns the lower and the upper bound of an extent. The upper bound is None if it is 2**31 - 1 or more.

    MLX stores extents as 32-bit integers, so that such a bound excludes no array.
    """
    if isinstance(extent, int):
        return extent, extent
    return range_of(extent.node.shape_env.bound_sympy(extent.node.expr))


def range_of(values) -> tuple[int, int | None]:
    """Returns the bounds of `values`, a ValueRanges of torch, as `bounds` does.

    torch assumes that a dynamic dimension is at least 2, so that a lower bound of 2 may stand for 0 or 1. A lower bound
    of 2 or less is therefore returned as 0.
    """
    lower = int(values.lower) if values.lower > 2 else 0
    upper = int(values.upper) if values.upper.is_finite and values.upper < 2**31 - 1 else None
    return lower, upper
