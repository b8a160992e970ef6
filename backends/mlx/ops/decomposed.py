"""Operators without an IR node, decomposed in torch into operators that have one.

`DECOMPOSITIONS` maps operators to the functions of this file: elementwise functions (exp2, erfc, copysign, …), bit
shifts, searches (bucketize, searchsorted, kthvalue), products (addbmm, bilinear), distances, put and diagonal_scatter.
`BY_TORCH` lists operators that are lowered through torch's own decompositions. An operator for which MLX has a function
belongs in the file of its family instead.
"""

from __future__ import annotations

import math

import torch
from torch._decomp import decomposition_table

from ..builder.registry import REGISTRY, Unsupported, tracing_handler

aten = torch.ops.aten

# -- elementwise --------------------------------------------------------------


def _exp2(x):
    return torch.pow(2.0, x if x.is_floating_point() else x.float())


# Chebyshev coefficients of erfc (Press et al., "Numerical Recipes in C", 2nd ed., section 6.2).
# The relative error is below 1.2e-7.
_ERFC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


def _erfc(x):
    wide = x.float()
    t = 1 / (1 + wide.abs() / 2)
    exponent = torch.full_like(t, _ERFC[-1])
    for coefficient in _ERFC[-2::-1]:
        exponent = exponent * t + coefficient
    tail = t * torch.exp(exponent - wide * wide)
    return torch.where(wide < 0, 2 - tail, tail).to(x.dtype if x.is_floating_point() else torch.float32)


def _signbit(x):
    # The reciprocal of -0.0 is negative infinity.
    return torch.where(x == 0, 1 / x, x) < 0 if x.is_floating_point() else x < 0


def _copysign(x, sign):
    negative = _signbit(sign) if isinstance(sign, torch.Tensor) else str(float(sign)).startswith("-")
    dtype = torch.result_type(x, sign)
    x = x.to(dtype if dtype.is_floating_point else torch.float32)
    if isinstance(negative, bool):
        return -x.abs() if negative else x.abs()
    return torch.where(negative, -x.abs(), x.abs())


def _ignoring_nan(extremum):
    """Return the torch function of fmin for `torch.minimum`, or of fmax for `torch.maximum`.

    If one operand is NaN, the result is the other operand.
    """

    def function(x, y):
        dtype = torch.result_type(x, y)
        x, y = torch.broadcast_tensors(x.to(dtype), y.to(dtype))
        if not dtype.is_floating_point:
            return extremum(x, y)
        return torch.where(torch.isnan(x), y, torch.where(torch.isnan(y), x, extremum(x, y)))

    return function


def _ldexp(x, exponent):
    # As in torch, the dtype of the exponent counts in the promotion.
    two = torch.full((), 2.0, dtype=x.dtype if x.is_floating_point() else torch.float32)
    return x * torch.pow(two, exponent)


def _logaddexp2(x, y):
    dtype = torch.result_type(x, y)
    x, y = x.to(dtype), y.to(dtype)
    return torch.logaddexp(x * math.log(2), y * math.log(2)) / math.log(2)


# -- bit shifts ---------------------------------------------------------------


def _shift(shift_by):
    """Return the torch function of a shift operator. `shift_by(x, distance, dtype)` shifts by a valid distance.

    A distance that is negative, or larger than the number of bits of the dtype, is replaced by that number of bits, as
    in torch.
    """

    def function(x, distance):
        dtype = torch.result_type(x, distance)
        operands = (v if isinstance(v, torch.Tensor) else torch.full((), v, dtype=torch.int64) for v in (x, distance))
        x, distance = (v.to(dtype) for v in operands)
        distance = distance.to(torch.int64)
        bits = torch.iinfo(dtype).bits
        all_bits = (distance < 0) | (distance >= bits)
        return shift_by(x, torch.where(all_bits, bits, distance), dtype)

    return function


def _power_of_two(exponent):
    return torch.pow(torch.full((), 2, dtype=torch.int64), exponent)


# `_left` and `_right` shift in two steps, because the factor of a single step could be 2^64, which exceeds int64.


def _left(x, distance, dtype):
    half = distance // 2
    shifted = x.to(torch.int64) * _power_of_two(half) * _power_of_two(distance - half)
    return shifted.to(dtype)  # the cast drops the bits that overflow


def _right(x, distance, dtype):
    half = distance // 2
    shifted = torch.div(x.to(torch.int64), _power_of_two(half), rounding_mode="floor")
    return torch.div(shifted, _power_of_two(distance - half), rounding_mode="floor").to(dtype)


# -- searches -----------------------------------------------------------------


def _bucketize(x, boundaries, *, out_int32=False, right=False):
    return _searchsorted(boundaries, x, out_int32=out_int32, right=right)


def _searchsorted(sorted_sequence, x, *, out_int32=False, right=False, side=None, sorter=None):
    """Return the insertion point of each element of `x`: the number of boundaries that come before the element."""
    if sorter is not None:
        sorted_sequence = sorted_sequence.gather(-1, sorter)
    boundaries = sorted_sequence if sorted_sequence.ndim == 1 else sorted_sequence.unsqueeze(-2)
    x = x.unsqueeze(-1)
    # The boundaries that are not after an element come before it. A comparison with NaN is false, so that all
    # boundaries come before a NaN.
    after = boundaries > x if right or side == "right" else boundaries >= x
    return (~after).sum(-1).to(torch.int32 if out_int32 else torch.int64)


def _kthvalue(x, k, dim=-1, keepdim=False):
    if x.ndim == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64)
    index = torch.argsort(x, dim=dim, stable=True).narrow(dim, k - 1, 1)
    values = x.gather(dim, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


# -- products -----------------------------------------------------------------


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


def _addbmm(x, a, b, *, beta=1, alpha=1):
    product = alpha * torch.bmm(a, b).sum(0)
    return product if beta == 0 else beta * x + product  # with beta = 0, torch ignores NaN in x


# -- others -------------------------------------------------------------------


def _rrelu(x, noise, lower=1 / 8, upper=1 / 3, training=False, generator=None):
    if training:
        raise Unsupported("training mode is unsupported; call eval() on the model before export")
    return torch.where(x >= 0, x, x * ((lower + upper) / 2)), noise.clone()


def _angle(x):
    x = x if x.is_floating_point() else x.float()
    return torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype))


def _dist(x, y, p=2):
    return torch.linalg.vector_norm(x - y, p)


def _pdist(x, p=2.0):
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1).unbind()
    return torch.linalg.vector_norm(x[first] - x[second], p, dim=-1)


def _diagonal_scatter(x, src, offset=0, dim1=0, dim2=1):
    moved, src = x.movedim((dim1, dim2), (-2, -1)), src.to(x.dtype)
    rows, columns = torch.arange(x.shape[dim1]).unsqueeze(-1), torch.arange(x.shape[dim2])
    # Row i of the matrix takes element i of src, or element i + offset if offset is negative: the diagonal then starts
    # below the first row.
    index = torch.clamp(rows + min(offset, 0), min=0, max=src.shape[-1] - 1).expand(moved.shape)
    spread = src.unsqueeze(-1).expand(*src.shape, moved.shape[-1]).gather(-2, index)
    return torch.where(columns - rows == offset, spread, moved).movedim((-2, -1), (dim1, dim2))


def _put(x, index, source, accumulate=False):
    flat = x.reshape(-1)
    return flat.index_put((index.reshape(-1),), source.reshape(-1), accumulate).reshape(x.shape)


DECOMPOSITIONS = {
    aten.addbmm.default: _addbmm,
    aten.angle.default: _angle,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.dist.default: _dist,
    aten._pdist_forward.default: _pdist,
    aten.put.default: _put,
    aten.exp2.default: _exp2,
    aten.special_exp2.default: _exp2,
    aten.erfc.default: _erfc,
    aten.special_erfc.default: _erfc,
    aten.logaddexp2.default: _logaddexp2,
    aten.signbit.default: _signbit,
    aten.copysign.Tensor: _copysign,
    aten.copysign.Scalar: _copysign,
    aten.fmin.default: _ignoring_nan(torch.minimum),
    aten.fmax.default: _ignoring_nan(torch.maximum),
    aten.ldexp.Tensor: _ldexp,
    aten.__lshift__.Scalar: _shift(_left),
    aten.__lshift__.Tensor: _shift(_left),
    aten.__rshift__.Scalar: _shift(_right),
    aten.__rshift__.Tensor: _shift(_right),
    aten.bitwise_left_shift.Tensor: _shift(_left),
    aten.bitwise_left_shift.Tensor_Scalar: _shift(_left),
    aten.bitwise_left_shift.Scalar_Tensor: _shift(_left),
    aten.bitwise_right_shift.Tensor: _shift(_right),
    aten.bitwise_right_shift.Tensor_Scalar: _shift(_right),
    aten.bitwise_right_shift.Scalar_Tensor: _shift(_right),
    aten.bucketize.Tensor: _bucketize,
    aten.searchsorted.Tensor: _searchsorted,
    aten.kthvalue.default: _kthvalue,
    aten.bilinear.default: _bilinear,
    aten._trilinear.default: _trilinear,
}

# ExecuTorch does not decompose these operators before the partitioner runs.
BY_TORCH = [
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten.addmv.default,
    aten.elu.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.native_layer_norm.default,
    aten.reflection_pad1d.default,
    aten.reflection_pad2d.default,
    aten.reflection_pad3d.default,
    aten.replication_pad1d.default,
    aten.replication_pad2d.default,
    aten.replication_pad3d.default,
]

for _target, _function in DECOMPOSITIONS.items():
    REGISTRY.decompose(_target, _function)
REGISTRY.add(
    aten.rrelu_with_noise_functional.default, tracing_handler(aten.rrelu_with_noise_functional.default, _rrelu)
)
for _target in BY_TORCH:
    REGISTRY.add(_target, tracing_handler(_target, decomposition_table[_target]))
