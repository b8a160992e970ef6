"""The range of a dynamic dimension."""

from __future__ import annotations

import torch


def bounds(extent: int | torch.SymInt) -> tuple[int, int | None]:
    """The lower and the upper bound of an extent. The upper bound is None if there is none below 2**31 - 1."""
    if isinstance(extent, int):
        return extent, extent
    return range_of(extent.node.shape_env.bound_sympy(extent.node.expr))


def range_of(values) -> tuple[int, int | None]:
    """The bounds of `values`, a ValueRanges of torch.

    torch assumes that a dynamic dimension is at least 2, so a lower bound of 2 may hide one of 0 or 1. It counts as 0.
    """
    lower = int(values.lower) if values.lower > 2 else 0
    upper = int(values.upper) if values.upper.is_finite and values.upper < 2**31 - 1 else None
    return lower, upper
