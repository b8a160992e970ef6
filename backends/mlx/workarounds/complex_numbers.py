"""Complex tensors, as pairs of real tensors.

ExecuTorch's edge dialect has almost no operators for complex tensors, so that it refuses models that rotate embeddings
by complex numbers. `with_real_numbers` replaces each complex tensor by its real and its imaginary part.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from ..extents import is_same_shape
from .rewriter import NoRule, Rewriter, has_replaced, rule_decorator

aten = torch.ops.aten


@dataclass(frozen=True)
class Pair:
    """A complex tensor: the nodes of its real and its imaginary part, or two numbers."""

    real: Any
    imag: Any


_RULES: dict[Any, Callable] = {}
_rule = rule_decorator(_RULES)


def with_real_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes the same with real tensors.

    Returns `program` itself if it has no complex tensor, or has one where there is no rule: as input or output, or as
    operand of an operator that `_RULES` lacks.
    """
    if not any(has_replaced(node, torch.is_complex) for node in program.graph.nodes):
        return program
    try:
        return _ComplexRewriter(program).rewrite()
    except NoRule:
        return program


class _ComplexRewriter(Rewriter):
    """Replaces each complex tensor by a `Pair`."""

    rules = _RULES
    is_replaced = staticmethod(torch.is_complex)

    def split(self, name: str, tensor: torch.Tensor) -> Pair:
        real, imag = (self.constant(f"{name}_{part}", getattr(tensor, part)) for part in ("real", "imag"))
        return Pair(real, imag)

    def checked(self, value: Node | Pair) -> Node | Pair:
        expected = self.node.meta.get("val")
        dtype = getattr(expected, "dtype", None)
        if isinstance(value, Node):
            return self._checked(value, dtype)
        dtype = dtype.to_real() if dtype else None
        return Pair(self._checked(value.real, dtype), self._checked(value.imag, dtype))

    def _checked(self, node: Node, dtype: torch.dtype | None) -> Node:
        """Return `node`, cast to `dtype` unless None. Raises `NoRule` if it has another shape than `self.node`."""
        if dtype is None:
            return node
        if not is_same_shape(node.meta["val"].shape, self.node.meta["val"].shape):
            raise NoRule
        return self.cast(node, dtype)


# -- rules ---------------------------------------------------------------------------------------


def _as_pair(P: _ComplexRewriter, x: Pair | Node | complex) -> Pair:
    if isinstance(x, Pair):
        return x
    return Pair(x, P.call(aten.zeros_like.default, x)) if isinstance(x, Node) else Pair(x.real, x.imag)


def _product(multiply: Callable, P: _ComplexRewriter, a: Any, b: Any) -> Pair:
    """Return the product of two complex or real operands, if `multiply` computes the product of two real ones."""
    a, b = (_as_pair(P, x) if isinstance(x, complex) else x for x in (a, b))
    if not isinstance(a, Pair):
        return Pair(multiply(a, b.real), multiply(a, b.imag))
    if not isinstance(b, Pair):
        return Pair(multiply(a.real, b), multiply(a.imag, b))
    return Pair(
        P.call(aten.sub.Tensor, multiply(a.real, b.real), multiply(a.imag, b.imag)),
        P.call(aten.add.Tensor, multiply(a.real, b.imag), multiply(a.imag, b.real)),
    )


@_rule(
    aten.alias, aten.chunk, aten.clone, aten.contiguous, aten.cumsum, aten.detach, aten.detach_, aten.diagonal,
    aten.expand, aten.expand_as, aten.fft_fftshift, aten.fft_ifftshift, aten.flatten, aten.flip, aten.index,
    aten.index_select, aten.lift_fresh_copy, aten.mT, aten.mean, aten.movedim, aten.narrow, aten.neg, aten.permute,
    aten.repeat, aten.repeat_interleave, aten.reshape, aten.roll, aten.select, aten.slice, aten.split,
    aten.split_with_sizes, aten.squeeze, aten.sum, aten.t, aten.tile, aten.transpose, aten.unbind, aten.unflatten,
    aten.unsqueeze, aten.view, aten._unsafe_view, operator.getitem,
)  # fmt: skip
def _each_part(P, x, *args, **kwargs):
    if not isinstance(x, Pair) or "dtype" in kwargs:
        raise NoRule
    return Pair(P.call(P.node.target, x.real, *args, **kwargs), P.call(P.node.target, x.imag, *args, **kwargs))


@_rule(aten.add, aten.sub, aten.rsub)
def _sum(P, a, b, **kwargs):
    if isinstance(kwargs.get("alpha"), complex):
        raise NoRule
    a, b = _as_pair(P, a), _as_pair(P, b)
    return Pair(P.call(P.node.target, a.real, b.real, **kwargs), P.call(P.node.target, a.imag, b.imag, **kwargs))


@_rule(aten.cat, aten.stack)
def _joined(P, tensors, *args):
    pairs = [_as_pair(P, x) for x in tensors]
    reals, imags = ([getattr(p, part) for p in pairs] for part in ("real", "imag"))
    return Pair(P.call(P.node.target, reals, *args), P.call(P.node.target, imags, *args))


@_rule(aten.where)
def _where(P, condition, a, b):
    a, b = _as_pair(P, a), _as_pair(P, b)
    return Pair(P.call(P.node.target, condition, a.real, b.real), P.call(P.node.target, condition, a.imag, b.imag))


@_rule(aten.mul, aten.matmul, aten.mm, aten.bmm)
def _mul(P, a, b):
    return _product(lambda x, y: P.call(P.node.target, x, y), P, a, b)


@_rule(aten.einsum)
def _einsum(P, equation, operands, **kwargs):
    if len(operands) != 2:
        raise NoRule
    return _product(lambda x, y: P.call(P.node.target, equation, [x, y], **kwargs), P, *operands)


@_rule(aten.div)
def _div(P, a, b):
    if not isinstance(b, Pair):
        a = _as_pair(P, a)
        return Pair(P.call(P.node.target, a.real, b), P.call(P.node.target, a.imag, b))
    # The squares of the scaled parts cannot overflow.
    scale = P.call(aten.maximum.default, P.call(aten.abs.default, b.real), P.call(aten.abs.default, b.imag))
    real, imag = (P.call(aten.div.Tensor, x, scale) for x in (b.real, b.imag))
    squares = P.call(aten.add.Tensor, P.call(aten.mul.Tensor, real, real), P.call(aten.mul.Tensor, imag, imag))
    size = P.call(aten.mul.Tensor, squares, scale)
    product = _product(lambda x, y: P.call(aten.mul.Tensor, x, y), P, a, _conj(P, Pair(real, imag)))
    return Pair(P.call(aten.div.Tensor, product.real, size), P.call(aten.div.Tensor, product.imag, size))


@_rule(aten.reciprocal)
def _reciprocal(P, x):
    return _div(P, 1.0, x)


@_rule(aten.conj, aten._conj, aten.conj_physical, aten._conj_physical)
def _conj(P, x):
    return Pair(x.real, P.call(aten.neg.default, x.imag))


@_rule(aten.resolve_conj, aten.resolve_neg)
def _itself(P, x):
    return x


@_rule(aten.exp)
def _exp(P, x):
    return _polar(P, P.call(aten.exp.default, x.real), x.imag)


@_rule(aten.polar)
def _polar(P, abs, angle):
    return Pair(
        P.call(aten.mul.Tensor, abs, P.call(aten.cos.default, angle)),
        P.call(aten.mul.Tensor, abs, P.call(aten.sin.default, angle)),
    )


@_rule(aten.complex)
def _complex(P, real, imag):
    return Pair(real, imag)


@_rule(aten.view_as_complex)
def _view_as_complex(P, x):
    return Pair(P.call(aten.select.int, x, -1, 0), P.call(aten.select.int, x, -1, 1))


@_rule(aten.view_as_real)
def _view_as_real(P, x):
    return P.call(aten.stack.default, [x.real, x.imag], -1)


@_rule(aten.real)
def _real(P, x):
    return x.real


@_rule(aten.imag)
def _imag(P, x):
    return x.imag


@_rule(aten.abs)
def _abs(P, x):
    # The square of the ratio cannot overflow. The denominator is neither zero nor infinite.
    parts = [P.call(aten.abs.default, part) for part in (x.real, x.imag)]
    larger, smaller = P.call(aten.maximum.default, *parts), P.call(aten.minimum.default, *parts)
    limits = torch.finfo(larger.meta["val"].dtype)
    ratio = P.call(aten.div.Tensor, smaller, P.call(aten.clamp.default, larger, limits.tiny, limits.max))
    squares = P.call(aten.add.Tensor, P.call(aten.mul.Tensor, ratio, ratio), 1.0)
    return P.call(aten.mul.Tensor, larger, P.call(aten.sqrt.default, squares))


@_rule(aten.angle)
def _angle(P, x):
    return P.call(aten.atan2.default, x.imag, x.real)


@_rule(aten.to, aten._to_copy, aten.type_as)
def _to(P, x, *args, **kwargs):
    dtype = P.node.meta["val"].dtype
    if not dtype.is_complex:
        return P.cast(x.real, dtype)
    return _as_pair(P, x if isinstance(x, Pair) else P.cast(x, dtype.to_real()))


@_rule(aten.sym_size)
def _size(P, x, *args):
    return P.call(P.node.target, x.real, *args)


# -- Fourier transforms, as products with matrices of cosines and sines -----------------------------

# The largest number of elements of a matrix. A larger product would take much longer than an FFT.
_MAX_ELEMENTS = 2**20


def _transform(
    P: _ComplexRewriter, x: Pair | Node, n: int | None, dim: int, norm: str | None, *,
    is_inverse: bool = False, is_half: bool = False,
) -> Pair:
    """Return the discrete Fourier transform of `x` along `dim`, or its first half, up to frequency n // 2.

    `n` is the length of the transform. A longer dimension is cut, and a shorter one is padded by zeros.
    """
    extent = _shape(x)[dim]
    n = extent if n is None else n
    angles = _angles(n, min(extent, n), n // 2 + 1 if is_half else n) * (1 if is_inverse else -1)
    matrices = _matrices(P, angles, _scale(n, norm, is_inverse))
    return _from_last(P, dim, _product(_matmul(P), P, _to_last(P, x, dim, len(angles)), matrices))


def _inverse_of_half(P: _ComplexRewriter, x: Pair, n: int | None, dim: int, norm: str | None) -> Node:
    """Return the real tensor of length `n` of whose transform along `dim` `x` is the first half."""
    extent = _shape(x)[dim]
    n = 2 * (extent - 1) if n is None else n
    angles = _angles(n, min(extent, n // 2 + 1), n)
    # Each frequency except 0 and n / 2 stands for two conjugate ones.
    counts = torch.tensor([1.0 if i in (0, n / 2) else 2.0 for i in range(len(angles))])
    matrices = _matrices(P, angles, counts[:, None] * _scale(n, norm, True))
    return _from_last(P, dim, _product(_matmul(P), P, _to_last(P, x, dim, len(angles)), matrices)).real


def _shape(x: Pair | Node) -> torch.Size:
    return (x.real if isinstance(x, Pair) else x).meta["val"].shape


def _angles(n: int, rows: int, columns: int) -> torch.Tensor:
    """Return the matrix of the angles 2πij / n."""
    if not all(isinstance(size, int) for size in (n, rows, columns)) or n < 1 or rows * columns > _MAX_ELEMENTS:
        raise NoRule
    return torch.outer(torch.arange(rows), torch.arange(columns)).remainder(n).double() * (2 * math.pi / n)


def _scale(n: int, norm: str | None, is_inverse: bool) -> float:
    if norm == "ortho":
        return n**-0.5
    return 1 / n if is_inverse == (norm != "forward") else 1.0


def _matrices(P: _ComplexRewriter, angles: torch.Tensor, scale: float | torch.Tensor) -> Pair:
    dtype = P.node.meta["val"].dtype
    dtype = dtype.to_real() if dtype.is_complex else dtype
    cosines, sines = ((function(angles) * scale).to(dtype) for function in (torch.cos, torch.sin))
    return Pair(P.constant("cosines", cosines), P.constant("sines", sines))


def _matmul(P: _ComplexRewriter) -> Callable:
    return lambda a, b: P.call(aten.matmul.default, P.cast(a, b.meta["val"].dtype), b)


def _to_last(P: _ComplexRewriter, x: Pair | Node, dim: int, count: int) -> Pair | Node:
    """Return the first `count` elements of each part of `x` along `dim`, which becomes the last dimension."""
    if isinstance(x, Pair):
        return Pair(_to_last(P, x.real, dim, count), _to_last(P, x.imag, dim, count))
    if _shape(x)[dim] != count:
        x = P.call(aten.slice.Tensor, x, dim, 0, count)
    return P.call(aten.transpose.int, x, dim, -1)


def _from_last(P: _ComplexRewriter, dim: int, x: Pair) -> Pair:
    return Pair(*(P.call(aten.transpose.int, part, dim, -1) for part in (x.real, x.imag)))


@_rule(aten.fft_fft)
def _fft(P, x, n=None, dim=-1, norm=None):
    return _transform(P, x, n, dim, norm)


@_rule(aten.fft_ifft)
def _ifft(P, x, n=None, dim=-1, norm=None):
    return _transform(P, x, n, dim, norm, is_inverse=True)


@_rule(aten.fft_rfft)
def _rfft(P, x, n=None, dim=-1, norm=None):
    return _transform(P, x, n, dim, norm, is_half=True)


@_rule(aten.fft_irfft)
def _irfft(P, x, n=None, dim=-1, norm=None):
    return _inverse_of_half(P, _as_pair(P, x), n, dim, norm)


def _axes(x: Pair | Node, s: list | None, dim: list | None) -> list[tuple[int | None, int]]:
    """Return the length and the dimension of each transform."""
    ndim = len(_shape(x))
    dim = dim or range(-ndim if s is None else -len(s), 0)
    return list(zip([None] * len(dim) if s is None else s, dim, strict=True))


@_rule(aten.fft_fft2, aten.fft_fftn, aten.fft_ifft2, aten.fft_ifftn)
def _fftn(P, x, s=None, dim=None, norm=None):
    is_two = P.node.target._overloadpacket in (aten.fft_fft2, aten.fft_ifft2)
    is_inverse = P.node.target._overloadpacket in (aten.fft_ifft2, aten.fft_ifftn)
    for n, d in _axes(x, s, dim or ([-2, -1] if is_two else None)):
        x = _transform(P, x, n, d, norm, is_inverse=is_inverse)
    return x


@_rule(aten.fft_rfft2, aten.fft_rfftn)
def _rfftn(P, x, s=None, dim=None, norm=None):
    is_two = P.node.target._overloadpacket is aten.fft_rfft2
    *others, (n, last) = _axes(x, s, dim or ([-2, -1] if is_two else None))
    x = _transform(P, x, n, last, norm, is_half=True)
    for n, d in others:
        x = _transform(P, x, n, d, norm)
    return x


@_rule(aten.fft_irfft2, aten.fft_irfftn)
def _irfftn(P, x, s=None, dim=None, norm=None):
    is_two = P.node.target._overloadpacket is aten.fft_irfft2
    x = _as_pair(P, x)
    *others, (n, last) = _axes(x, s, dim or ([-2, -1] if is_two else None))
    for m, d in others:
        x = _transform(P, x, m, d, norm, is_inverse=True)
    return _inverse_of_half(P, x, n, last, norm)


@_rule(aten.stft)
def _stft(
    P, x, n_fft, hop_length=None, win_length=None, window=None, normalized=False, onesided=None, return_complex=None,
    align_to_window=None,
):
    length = n_fft if win_length is None else win_length
    if P.node.target is not aten.stft.default or align_to_window or isinstance(x, Pair) or isinstance(window, Pair):
        raise NoRule
    frames = P.call(aten.unfold.default, x, -1, n_fft, n_fft // 4 if hop_length is None else hop_length)
    if window is None and length < n_fft:
        window = P.constant("window", torch.ones(length, dtype=x.meta["val"].dtype))
    if window is not None:
        left = (n_fft - length) // 2
        padded = P.call(aten.constant_pad_nd.default, window, [left, n_fft - length - left])
        frames = P.call(aten.mul.Tensor, frames, padded)
    norm = "ortho" if normalized else None
    spectrum = _transform(P, frames, None, -1, norm, is_half=onesided is not False)
    return Pair(*(P.call(aten.transpose.int, part, -2, -1) for part in (spectrum.real, spectrum.imag)))
