"""Comparisons of extents without guards, and the range of a dynamic dimension.

A comparison of `torch.SymInt` is decided by the sizes of the example, and the program is then valid only for sizes that
compare in the same way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


def expressions(shape: Iterable[int | torch.SymInt]) -> list[Any]:
    """Return the extents of `shape`: ints, and symbolic expressions for dynamic extents.

    A comparison of such expressions adds no guards to the graph. Expressions that differ may have the same value.
    """
    return [e if isinstance(e, int) else e.node.expr for e in shape]


def is_same_shape(a: Iterable[int | torch.SymInt], b: Iterable[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal for all sizes of the inputs."""
    return expressions(a) == expressions(b)


def is_empty(shape: Iterable[int | torch.SymInt]) -> bool:
    """Whether an extent is statically 0."""
    return 0 in expressions(shape)


def may_be_empty(extent: int | torch.SymInt) -> bool:
    """Whether an extent may be 0 although no input is empty."""
    if isinstance(extent, int):
        return extent == 0
    expression, ranges = extent.node.expr, extent.node.shape_env.var_to_range
    is_unbacked = {symbol: symbol.name.startswith("u") for symbol in expression.free_symbols}
    symbols = {
        symbol: ranges[symbol] if unbacked else ValueRanges(1, ranges[symbol].upper)
        for symbol, unbacked in is_unbacked.items()
    }
    return bool(bound_sympy(expression, symbols).lower <= 0)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the axes of a tensor as they lie in memory, outermost first, or None if the tensor is row-major.

    For a dynamic extent, the size of the example decides. Returns None if there is no example.
    """
    strides = [s if isinstance(s, int) else s.node.hint for s in tensor.stride()]
    if None in strides:
        return None
    order = tuple(sorted(range(len(strides)), key=lambda axis: -strides[axis]))  # as in ExecuTorch's TensorSpec
    return None if order == tuple(range(len(strides))) else order


def bounds(extent: int | torch.SymInt) -> tuple[int, int | None]:
    """Return the lower and the upper bound of an extent. The upper bound is None if it is 2**31 - 1 or more.

    MLX stores extents as 32-bit integers, so that such a bound excludes no array.
    """
    if isinstance(extent, int):
        return extent, extent
    expression, ranges = extent.node.expr, extent.node.shape_env.var_to_range
    symbols = {symbol: _with_small_sizes(ranges[symbol]) for symbol in expression.free_symbols}
    return range_of(bound_sympy(expression, symbols))


def _with_small_sizes(values: ValueRanges) -> ValueRanges:
    """Return the range of a symbol, extended to 0 if it begins at 1 or 2: see `range_of`."""
    return ValueRanges(0, values.upper) if 0 <= values.lower <= 2 else values


def range_of(values: ValueRanges) -> tuple[int, int | None]:
    """Return the bounds of `values` as `bounds` does.

    torch assumes that a dynamic dimension is at least 2, so that a lower bound of 2 may stand for 0 or 1. A lower bound
    of 2 or less is therefore returned as 0.
    """
    lower = int(values.lower) if values.lower > 2 else 0
    upper = int(values.upper) if values.upper.is_finite and values.upper < 2**31 - 1 else None
    return lower, upper
