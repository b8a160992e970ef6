"""Fourier transforms, as products with matrices of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from ..rewriter import NoRule, Rewriter
from .pair import Pair
from .rules import as_pair, product

aten = torch.ops.aten

# The largest number of elements of a matrix. A larger product would take much longer than an FFT.
_MAX_ELEMENTS = 2**20


def _transform(
    P: Rewriter,
    x: Pair | Node,
    n: int | None = None,
    dim: int = -1,
    norm: str | None = None,
    *,
    is_inverse: bool = False,
    is_half: bool = False,
) -> Pair:
    """Return the discrete Fourier transform of `x` along `dim`, or its first half, up to frequency n // 2.

    `n` is the length of the transform. A longer dimension is cut, and a shorter one is padded by zeros.
    """
    extent = _shape(x)[dim]
    n = extent if n is None else n
    turns = _turns(n, min(extent, n), n // 2 + 1 if is_half else n) * (1 if is_inverse else -1)
    return _multiplied(P, x, dim, turns, _scale(n, norm, is_inverse))


def _inverse_of_half(P: Rewriter, x: Pair | Node, n: int | None = None, dim: int = -1, norm: str | None = None) -> Node:
    """Return the real tensor of length `n` of whose transform along `dim` `x` is the first half."""
    extent = _shape(x)[dim]
    n = 2 * (extent - 1) if n is None else n
    turns = _turns(n, min(extent, n // 2 + 1), n)
    # Each frequency except 0 and n / 2 stands for two conjugate ones.
    counts = torch.tensor([1.0 if i in (0, n / 2) else 2.0 for i in range(len(turns))])
    return _multiplied(P, as_pair(P, x), dim, turns, counts[:, None] * _scale(n, norm, True)).real


def _shape(x: Pair | Node) -> torch.Size:
    return (x.real if isinstance(x, Pair) else x).meta["val"].shape


def _turns(n: int, rows: int, columns: int) -> torch.Tensor:
    """Return the matrix of the angles ij / n, in turns."""
    if not all(isinstance(size, int) for size in (n, rows, columns)) or n < 1 or rows * columns > _MAX_ELEMENTS:
        raise NoRule
    return torch.outer(torch.arange(rows), torch.arange(columns)).remainder(n).double() / n


def _scale(n: int, norm: str | None, is_inverse: bool) -> float:
    if norm == "ortho":
        return n**-0.5
    return 1 / n if is_inverse == (norm != "forward") else 1.0


def _cosines(turns: torch.Tensor) -> torch.Tensor:
    """Return the cosines of angles in turns: exactly 0 and ±1 for multiples of a quarter turn."""
    quarters = (4 * turns).remainder(4)
    cosines = torch.cos(2 * math.pi * turns)
    return torch.where(quarters == quarters.round(), cosines.round(), cosines)


def _multiplied(P: Rewriter, x: Pair | Node, dim: int, turns: torch.Tensor, scale: float | torch.Tensor) -> Pair:
    """Return the products of `x` along `dim` with the matrix of exp(2πi * turns) * scale.

    The matrix may have fewer rows than `x` has elements along `dim`: it is multiplied by the first ones.
    """
    dtype = P.node.meta["val"].dtype.to_real()
    cosines, sines = ((_cosines(angles) * scale).to(dtype) for angles in (turns, turns - 0.25))
    matrices = Pair(P.constant("cosines", cosines), P.constant("sines", sines))

    def multiply(a: Node, b: Node) -> Node:
        return P.call(aten.matmul.default, P.cast(a, dtype), b)

    return _with_last(P, product(multiply, P, _to_last(P, x, dim, len(turns)), matrices), dim)


def _to_last(P: Rewriter, x: Pair | Node, dim: int, count: int) -> Pair | Node:
    """Return the first `count` elements of each part of `x` along `dim`, which becomes the last dimension."""
    if isinstance(x, Pair):
        return Pair(_to_last(P, x.real, dim, count), _to_last(P, x.imag, dim, count))
    if _shape(x)[dim] != count:
        x = P.call(aten.slice.Tensor, x, dim, 0, count)
    return P.call(aten.transpose.int, x, dim, -1)


def _with_last(P: Rewriter, x: Pair, dim: int) -> Pair:
    """Return `x` with its last dimension in the place of `dim`, and `dim` as the last one."""
    return Pair(*(P.call(aten.transpose.int, part, dim, -1) for part in (x.real, x.imag)))


# -- several dimensions --------------------------------------------------------------------------


def _axes(x: Pair | Node, s: list | None, dim: list | None) -> list[tuple[int | None, int]]:
    """Return the length and the dimension of each transform."""
    ndim = len(_shape(x))
    axes = dim or range(-ndim if s is None else -len(s), 0)
    return list(zip([None] * len(axes) if s is None else s, axes, strict=True))


def _fftn(P, x, s=None, dim=None, norm=None, *, is_inverse=False):
    for n, d in _axes(x, s, dim):
        x = _transform(P, x, n, d, norm, is_inverse=is_inverse)
    return x


def _rfftn(P, x, s=None, dim=None, norm=None):
    *others, (n, last) = _axes(x, s, dim)
    x = _transform(P, x, n, last, norm, is_half=True)
    for m, d in others:
        x = _transform(P, x, m, d, norm)
    return x


def _irfftn(P, x, s=None, dim=None, norm=None):
    x = as_pair(P, x)
    *others, (n, last) = _axes(x, s, dim)
    for m, d in others:
        x = _transform(P, x, m, d, norm, is_inverse=True)
    return _inverse_of_half(P, x, n, last, norm)


def _of_two(rule: Callable) -> Callable:
    """Return `rule`, with the two last dimensions by default."""
    return lambda P, x, s=None, dim=(-2, -1), norm=None: rule(P, x, s, dim, norm)


# -- short-time transforms -----------------------------------------------------------------------


def _stft(
    P,
    x,
    n_fft,
    hop_length=None,
    win_length=None,
    window=None,
    normalized=False,
    onesided=None,
    return_complex=None,
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
    return _with_last(P, _transform(P, frames, norm=norm, is_half=onesided is not False), -2)


# Operator → rule, as in rules.py.
RULES: dict[Any, Callable] = {
    aten.fft_fft: _transform,
    aten.fft_ifft: partial(_transform, is_inverse=True),
    aten.fft_rfft: partial(_transform, is_half=True),
    aten.fft_irfft: _inverse_of_half,
    aten.fft_fftn: _fftn,
    aten.fft_ifftn: partial(_fftn, is_inverse=True),
    aten.fft_rfftn: _rfftn,
    aten.fft_irfftn: _irfftn,
    aten.fft_fft2: _of_two(_fftn),
    aten.fft_ifft2: _of_two(partial(_fftn, is_inverse=True)),
    aten.fft_rfft2: _of_two(_rfftn),
    aten.fft_irfft2: _of_two(_irfftn),
    aten.stft: _stft,
}
