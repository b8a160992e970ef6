"""GELU written as arithmetic, fused to `GeluNode`.

x/2 * (1 + erf(x/√2))
x/2 * (1 + tanh(√(2/π) (x + 0.044715 x³)))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from ..builder.lowering import Lowering
from ..builder.matcher import Match, Matcher, NoMatch, attempt, extents, is_call, tensor
from ..builder.registry import REGISTRY
from ..serialization import ir

_MUL = ("aten.mul.Tensor", "aten.mul.Scalar")
_ADD = ("aten.add.Tensor", "aten.add.Scalar")
_POW = "aten.pow.Tensor_Scalar"
_CUBIC = 0.044715


def _product(m: Matcher, node: Any) -> tuple[float, list[Node]]:
    """Take a product apart. Returns the product of its numbers, and a list of its other factors.

    Divisions by a number, and powers with exponent 2 or 3, count as products. A node with several users, such as the
    argument x of a GELU, is a factor and is not taken apart.
    """
    if is_call(node, *_MUL) and (not m.nodes or len(node.users) == 1):
        number, factors = 1.0, []
        for operand in m.arguments(node, _MUL, "self", "other"):
            n, f = _product(m, operand)
            number, factors = number * n, factors + f
        return number, factors
    if is_call(node, "aten.div.Tensor") and len(node.users) == 1:
        numerator, denominator = m.arguments(node, ["aten.div.Tensor"], "self", "other")
        number, factors = _product(m, numerator)
        divisor = m.number(denominator)
        if divisor == 0:
            raise NoMatch
        return number / divisor, factors
    if is_call(node, _POW) and len(node.users) == 1:
        base, exponent = m.arguments(node, [_POW], "self", "exponent")
        if exponent not in (2, 3):
            raise NoMatch
        return 1.0, [base] * int(exponent)
    try:
        return m.number(node), []
    except NoMatch:
        return 1.0, [node]


def _sum(m: Matcher, node: Any) -> tuple[float, Any]:
    """Return (c, y) for y + c or c + y with a number c. Returns (0, node) if neither operand is a number."""
    for y, number in m.commuted(node, *_ADD):
        try:
            return m.number(number), y
        except NoMatch:
            pass
    return 0.0, node


def _close(number: float, expected: float, dtype: torch.dtype) -> bool:
    """Whether two numbers agree up to rounding in `dtype`."""
    return math.isclose(number, expected, rel_tol=4 * torch.finfo(dtype).eps)


def _gelu(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    if not is_call(node, *_MUL) or not tensor(node).is_floating_point():
        raise NoMatch
    dtype = tensor(node).dtype
    half, factors = _product(m, node)
    if len(factors) != 2 or half != 0.5:
        raise NoMatch
    for x, gate in (factors, factors[::-1]):
        if is_call(gate, *_ADD):
            break
    else:
        raise NoMatch
    one, inner = _sum(m, gate)
    if one != 1 or tensor(x).dtype != dtype or extents(x) != extents(node):
        raise NoMatch
    if is_call(inner, "aten.erf.default"):
        number, factors = _product(m, *m.arguments(inner, ["aten.erf.default"], "self"))
        if factors != [x] or not _close(number, math.sqrt(0.5), dtype):
            raise NoMatch
        approximate = "none"
    else:
        (polynomial,) = m.arguments(inner, ["aten.tanh.default"], "self")
        _check_polynomial(m, polynomial, x, dtype)
        approximate = "tanh"
    return m.finish(node, lambda P, last: P.emit(ir.GeluNode, x=P.value(x), approximate=approximate))


def _check_polynomial(m: Matcher, node: Any, x: Node, dtype: torch.dtype) -> None:
    """Raise NoMatch unless `node` is √(2/π) (x + 0.044715 x³) or √(2/π) x (1 + 0.044715 x²)."""
    number, factors = _product(m, node)
    if not _close(number, math.sqrt(2 / math.pi), dtype):
        raise NoMatch
    power = 2 if x in factors else 3
    others = [f for f in factors if f is not x]
    if len(others) != 1 or len(factors) != 4 - power:
        raise NoMatch
    (inner,) = others
    for first, term in m.commuted(inner, *_ADD):
        matches = first is x if power == 3 else _is_one(m, first)
        if matches:
            number, factors = _product(m, term)
            if factors == [x] * power and _close(number, _CUBIC, dtype):
                return
    raise NoMatch


def _is_one(m: Matcher, value: Any) -> bool:
    try:
        return m.number(value) == 1
    except NoMatch:
        return False


REGISTRY.pattern(attempt(_gelu))
