"""zeros.scatter_add(dim, index, src) + x, the gradient of x that is also gathered from: one `ScatterAddNode` into x.

Without the pattern, a program would fill an array with zeros, and add two arrays, both as large as x.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..builder.lowering import Lowering
from ..builder.matcher import Match, Matcher, NoMatch, attempt, extents, is_call, tensor
from ..builder.registry import REGISTRY
from ..ops.lib.scattered_sum import add_scattered


def _scatter_and_add(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    x, dim, index, src = _operands(m, node)

    def lower(P: Lowering, last):
        return add_scattered(P, P.value(x), dim, P.value(index), P.value(src))

    return m.finish(node, lower)


def _operands(m: Matcher, node: Node) -> tuple[Node, int, Node, Node]:
    """Add a sum and its scattered operand to the match. Return the other operand, and the arguments of the scatter."""
    value = tensor(node)
    for scattered, x in m.commuted(node, "aten.add.Tensor"):
        if not is_call(scattered, "aten.scatter_add.default"):
            continue
        zeros, *arguments = m.arguments(scattered, ["aten.scatter_add.default"], "self", "dim", "index", "src")
        is_same = tensor(x).dtype == value.dtype and extents(x) == extents(scattered) == extents(node)
        if _is_zero(m.P, zeros) and is_same and value.dtype.is_floating_point and value.ndim > 0:
            return x, *arguments
    raise NoMatch


def _is_zero(P: Lowering, node: Any) -> bool:
    """Whether a node, which stays outside of the match, is filled with zeros."""
    if is_call(node, "aten.full.default"):
        _, value, _ = Matcher(P).arguments(node, ["aten.full.default"], "size", "fill_value", "dtype")
        return value == 0
    return is_call(node, "aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default")


REGISTRY.pattern(attempt(_scatter_and_add))
