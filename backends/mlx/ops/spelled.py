"""Operators without a node, spelled out in torch over those that have one."""

from __future__ import annotations

import math

import torch

from ..builder.registry import REGISTRY

aten = torch.ops.aten

# Elementwise -----------------------------------------------------------------------------


def _exp2(x):
    return torch.pow(2.0, x if x.is_floating_point() else x.float())


# Chebyshev coefficients of erfc (Press et al., "Numerical Recipes in C", 2nd ed., section 6.2),
# whose relative error is below 1.2e-7.
_ERFC = (-1.26551223, 1.00002368, 0.37409196, 0.09678418, -0.18628806, 0.27886807, -1.13520398,
         1.48851587, -0.82215223, 0.17087277)


def _erfc(x):
    wide = x.float()
    t = 1 / (1 + wide.abs() / 2)
    exponent = torch.full_like(t, _ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        exponent = exponent * t + coefficient
    tail = t * torch.exp(exponent - wide * wide)
    return torch.where(wide < 0, 2 - tail, tail).to(x.dtype if x.is_floating_point() else torch.float32)


def _signbit(x):
    return torch.where(x == 0, 1 / x, x) < 0 if x.is_floating_point() else x < 0


def _copysign(x, sign):
    negative = _signbit(sign) if isinstance(sign, torch.Tensor) else str(float(sign)).startswith("-")
    x = x if x.is_floating_point() else x.float()
    if isinstance(negative, bool):
        return -x.abs() if negative else x.abs()
    dtype = torch.result_type(x, sign)
    return torch.where(negative, -x.abs(), x.abs()).to(dtype)


def _of_two(extreme):
    """The extreme of two, of which a NaN does not count."""

    def text(x, y):
        dtype = torch.result_type(x, y)
        x, y = torch.broadcast_tensors(x.to(dtype), y.to(dtype))
        if not dtype.is_floating_point:
            return extreme(x, y)
        return torch.where(torch.isnan(x), y, torch.where(torch.isnan(y), x, extreme(x, y)))

    return text


def _ldexp(x, exponent):
    return x * torch.pow(2.0, exponent).to(x.dtype if x.is_floating_point() else torch.float32)


def _logaddexp2(x, y):
    return torch.logaddexp(x * math.log(2), y * math.log(2)) / math.log(2)


# Bits ------------------------------------------------------------------------------------


def _shift(by):
    """`by(x, distance, dtype)` for distances from 0 to the bits of `dtype`, which those beyond count as."""

    def text(x, distance):
        if not isinstance(distance, torch.Tensor):
            distance = torch.full((), distance, dtype=x.dtype)
        dtype = torch.result_type(x, distance)
        x, distance = x.to(dtype), distance.to(torch.int64)
        bits = torch.iinfo(dtype).bits
        far = (distance < 0) | (distance >= bits)
        return by(x, torch.where(far, bits, distance), dtype)

    return text


def _two_to(exponent):
    return torch.pow(torch.full((), 2, dtype=torch.int64), exponent)


def _left(x, distance, dtype):
    # In two steps: 2^64 is no integer. What overflows is dropped by the cast.
    half = distance // 2
    return (x.to(torch.int64) * _two_to(half) * _two_to(distance - half)).to(dtype)


def _right(x, distance, dtype):
    half = distance // 2
    once = torch.div(x.to(torch.int64), _two_to(half), rounding_mode="floor")
    return torch.div(once, _two_to(distance - half), rounding_mode="floor").to(dtype)


# Order -----------------------------------------------------------------------------------


def _bucketize(x, boundaries, *, out_int32=False, right=False):
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _searchsorted(sorted_sequence, x, *, out_int32=False, right=False, side=None, sorter=None):
    """How many stand before each: a comparison with all of them."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    row = sorted_sequence if sorted_sequence.ndim == 1 else sorted_sequence.unsqueeze(-2)
    x = x.unsqueeze(-1)
    # A NaN stands behind all.
    behind = row > x if right or side == "right" else row >= x
    return (~behind).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _kthvalue(x, k, dim=-1, keepdim=False):
    if x.ndim == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    places = torch.argsort(x, dim=dim, stable=True).narrow(dim, k - 1, 1)
    values = x.gather(dim, places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


# Products --------------------------------------------------------------------------------


def _bilinear(x, y, weight, bias=None):
    product = torch.einsum("...i,nij,...j->...n", x, weight, y)
    return product if bias is None else product + bias


def _trilinear(a, b, c, expand1, expand2, expand3, sumdim, unroll_dim=1):
    for dim in expand1:
        a = a.unsqueeze(dim)
    for dim in expand2:
        b = b.unsqueeze(dim)
    for dim in expand3:
        c = c.unsqueeze(dim)
    product = a * b * c
    return product.sum(sumdim) if sumdim else product


TEXTS = {
    aten.exp2.default: _exp2,
    aten.special_exp2.default: _exp2,
    aten.erfc.default: _erfc,
    aten.special_erfc.default: _erfc,
    aten.logaddexp2.default: _logaddexp2,
    aten.signbit.default: _signbit,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
    aten.fmin.default: _of_two(torch.minimum),
    aten.fmax.default: _of_two(torch.maximum),
    aten.ldexp.Tensor: _ldexp,
    aten.__lshift__.Scalar: _shift(_left),
    aten.__lshift__.Tensor: _shift(_left),
    aten.__rshift__.Scalar: _shift(_right),
    aten.__rshift__.Tensor: _shift(_right),
    aten.bitwise_left_shift.Tensor: _shift(_left),
    aten.bitwise_left_shift.Tensor_Scalar: _shift(_left),
    aten.bitwise_right_shift.Tensor: _shift(_right),
    aten.bitwise_right_shift.Tensor_Scalar: _shift(_right),
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
    aten.kthvalue.default: _kthvalue,
    aten.bilinear.default: _bilinear,
    aten._trilinear.default: _trilinear,
}

for _target, _text in TEXTS.items():
    REGISTRY.spell(_target, _text)
