"""Operators of complex tensors, as operators of their real and imaginary parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from ..rewriter import MOVES, NoRule, Rewriter
from .pair import Pair

aten = torch.ops.aten


def as_pair(P: Rewriter, x: Pair | Node | complex) -> Pair:
    """Return a complex or real operand as a pair."""
    if isinstance(x, Pair):
        return x
    return Pair(x, P.call(aten.zeros_like.default, x)) if isinstance(x, Node) else Pair(x.real, x.imag)


def product(multiply: Callable, P: Rewriter, a: Any, b: Any) -> Pair:
    """Return the product of two operands, of which one is complex. `multiply` computes the product of two real ones."""
    a, b = (as_pair(P, x) if isinstance(x, complex) else x for x in (a, b))
    if not isinstance(a, Pair):
        return Pair(multiply(a, b.real), multiply(a, b.imag))
    if not isinstance(b, Pair):
        return Pair(multiply(a.real, b), multiply(a.imag, b))
    return Pair(
        P.call(aten.sub.Tensor, multiply(a.real, b.real), multiply(a.imag, b.imag)),
        P.call(aten.add.Tensor, multiply(a.real, b.imag), multiply(a.imag, b.real)),
    )


def _each_part(P, x, *args, **kwargs):
    if not isinstance(x, Pair) or "dtype" in kwargs:
        raise NoRule
    return Pair(P.call(P.node.target, x.real, *args, **kwargs), P.call(P.node.target, x.imag, *args, **kwargs))


def _sum(P, a, b, **kwargs):
    if isinstance(kwargs.get("alpha"), complex):
        raise NoRule
    a, b = as_pair(P, a), as_pair(P, b)
    return Pair(P.call(P.node.target, a.real, b.real, **kwargs), P.call(P.node.target, a.imag, b.imag, **kwargs))


def _joined(P, tensors, *args):
    pairs = [as_pair(P, x) for x in tensors]
    reals, imags = ([getattr(p, part) for p in pairs] for part in ("real", "imag"))
    return Pair(P.call(P.node.target, reals, *args), P.call(P.node.target, imags, *args))


def _where(P, condition, a, b):
    a, b = as_pair(P, a), as_pair(P, b)
    return Pair(P.call(P.node.target, condition, a.real, b.real), P.call(P.node.target, condition, a.imag, b.imag))


def _mul(P, a, b):
    return product(partial(P.call, P.node.target), P, a, b)


def _einsum(P, equation, operands, **kwargs):
    if len(operands) != 2:
        raise NoRule
    return product(lambda x, y: P.call(P.node.target, equation, [x, y], **kwargs), P, *operands)


def _div(P, a, b):
    if not isinstance(b, Pair):
        a = as_pair(P, a)
        return Pair(P.call(P.node.target, a.real, b), P.call(P.node.target, a.imag, b))
    # The squares of the scaled parts cannot overflow.
    scale = P.call(aten.maximum.default, P.call(aten.abs.default, b.real), P.call(aten.abs.default, b.imag))
    real, imag = (P.call(aten.div.Tensor, x, scale) for x in (b.real, b.imag))
    squares = P.call(aten.add.Tensor, P.call(aten.mul.Tensor, real, real), P.call(aten.mul.Tensor, imag, imag))
    size = P.call(aten.mul.Tensor, squares, scale)
    numerator = product(partial(P.call, aten.mul.Tensor), P, a, _conj(P, Pair(real, imag)))
    return Pair(P.call(aten.div.Tensor, numerator.real, size), P.call(aten.div.Tensor, numerator.imag, size))


def _reciprocal(P, x):
    return _div(P, 1.0, x)


def _conj(P, x):
    return Pair(x.real, P.call(aten.neg.default, x.imag))


def _itself(P, x):
    return x


def _exp(P, x):
    return _polar(P, P.call(aten.exp.default, x.real), x.imag)


def _polar(P, abs, angle):
    return Pair(
        P.call(aten.mul.Tensor, abs, P.call(aten.cos.default, angle)),
        P.call(aten.mul.Tensor, abs, P.call(aten.sin.default, angle)),
    )


def _complex(P, real, imag):
    return Pair(real, imag)


def _view_as_complex(P, x):
    return Pair(P.call(aten.select.int, x, -1, 0), P.call(aten.select.int, x, -1, 1))


def _view_as_real(P, x):
    return P.call(aten.stack.default, [x.real, x.imag], -1)


def _real(P, x):
    return x.real


def _imag(P, x):
    return x.imag


def _abs(P, x):
    # The square of the ratio cannot overflow. The denominator is neither zero nor infinite.
    parts = [P.call(aten.abs.default, part) for part in (x.real, x.imag)]
    larger, smaller = P.call(aten.maximum.default, *parts), P.call(aten.minimum.default, *parts)
    limits = torch.finfo(larger.meta["val"].dtype)
    ratio = P.call(aten.div.Tensor, smaller, P.call(aten.clamp.default, larger, limits.tiny, limits.max))
    squares = P.call(aten.add.Tensor, P.call(aten.mul.Tensor, ratio, ratio), 1.0)
    return P.call(aten.mul.Tensor, larger, P.call(aten.sqrt.default, squares))


def _angle(P, x):
    return P.call(aten.atan2.default, x.imag, x.real)


def _to(P, x, *args, **kwargs):
    dtype = P.node.meta["val"].dtype
    if not dtype.is_complex:
        return P.cast(x.real, dtype)
    return as_pair(P, x if isinstance(x, Pair) else P.cast(x, dtype.to_real()))


def _size(P, x, *args):
    return P.call(P.node.target, x.real, *args)


# The operators that do the same to both parts.
_PARTWISE = [*MOVES, aten.cumsum, aten.detach_, aten.fft_fftshift, aten.fft_ifftshift, aten.mean, aten.sum]

# Operator → rule. `Rewriter` says what a rule is.
RULES: dict[Any, Callable] = dict.fromkeys(_PARTWISE, _each_part) | {
    aten.add: _sum,
    aten.sub: _sum,
    aten.rsub: _sum,
    aten.cat: _joined,
    aten.stack: _joined,
    aten.where: _where,
    aten.mul: _mul,
    aten.matmul: _mul,
    aten.mm: _mul,
    aten.bmm: _mul,
    aten.einsum: _einsum,
    aten.div: _div,
    aten.reciprocal: _reciprocal,
    aten.conj: _conj,
    aten._conj: _conj,
    aten.conj_physical: _conj,
    aten._conj_physical: _conj,
    aten.resolve_conj: _itself,
    aten.resolve_neg: _itself,
    aten.exp: _exp,
    aten.polar: _polar,
    aten.complex: _complex,
    aten.view_as_complex: _view_as_complex,
    aten.view_as_real: _view_as_real,
    aten.real: _real,
    aten.imag: _imag,
    aten.abs: _abs,
    aten.angle: _angle,
    aten.to: _to,
    aten._to_copy: _to,
    aten.type_as: _to,
    aten.sym_size: _size,
}
