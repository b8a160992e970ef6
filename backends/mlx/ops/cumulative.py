"""Decomposes cumprod, logcumsumexp, cummax and cummin.

Of the cumulative operators, the IR has only the sum. The operators here take log2(extent) steps. Each step doubles the
number of elements that a result covers (a Hillis-Steele scan).
"""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY
from ..extents import bounds

aten = torch.ops.aten


def inclusive_scan(combine, dim, *tensors, most=None):
    """Combines each element of `tensors` with all earlier elements along `dim`. Returns a list of as many tensors.

    `combine(earlier, later)` takes two lists of tensors, one for each of `tensors`, and returns such a list. It is
    elementwise and associative. If `most` is not None, no result depends on more than the `most` latest elements.
    """
    extent = tensors[0].shape[dim]
    step = _static_step if isinstance(extent, int) else _dynamic_step
    _, largest = bounds(extent)
    most = min(n for n in (most, largest, 2**31 - 1) if n is not None)
    covered = 1
    while covered < most:
        tensors = step(combine, dim, covered, tensors)
        covered *= 2
    return tensors


def _static_step(combine, dim, covered, tensors):
    """Doubles the number of elements that each result covers, which is `covered` before the step."""
    rest = tensors[0].shape[dim] - covered
    head = [p.narrow(dim, 0, covered) for p in tensors]
    earlier = [p.narrow(dim, 0, rest) for p in tensors]
    later = [p.narrow(dim, covered, rest) for p in tensors]
    return [torch.cat(pair, dim) for pair in zip(head, combine(earlier, later))]


def _dynamic_step(combine, dim, covered, tensors):
    """Does the same as `_static_step` for a dynamic extent.

    It never compares the extent with `covered`, because such a comparison would restrict the extent.
    """
    x = tensors[0]
    earlier = [torch.roll(p, covered, dim) for p in tensors]
    has_earlier = _along(torch.arange(x.shape[dim]) >= covered, x, dim)
    return [torch.where(has_earlier, new, old) for new, old in zip(combine(earlier, tensors), tensors)]


def _along(values, x, dim):
    """Returns the 1-d tensor `values` in a shape that broadcasts along axis `dim` of `x`."""
    return values.reshape([-1] + [1] * (x.ndim - 1 - dim % x.ndim))


def _cumprod(x, dim, dtype=None):
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    x = x.to(dtype)
    if x.ndim == 0:
        return x.clone()
    # torch multiplies in float32. In half precision, a product may overflow, and its product with a zero is NaN.
    is_half = dtype in (torch.float16, torch.bfloat16)
    (products,) = inclusive_scan(lambda a, b: [a[0] * b[0]], dim, x.float() if is_half else x)
    return products.to(dtype)


def _logcumsumexp(x, dim):
    if x.ndim == 0:
        return x.clone()
    return inclusive_scan(lambda a, b: [torch.logaddexp(a[0], b[0])], dim, x)[0]


def _cumulative_extremum(replaces):
    """Returns the torch function for cummax or cummin, which computes values and indices.

    `replaces(y, x)` says, elementwise, whether a later value y replaces an earlier value x. A later NaN always replaces
    the earlier value.
    """

    def combine(earlier, later):
        (x, i), (y, j) = earlier, later
        wins = replaces(y, x)
        if y.is_floating_point():
            wins = wins | torch.isnan(y)
        return [torch.where(wins, y, x), torch.where(wins, j, i)]

    def scan(x, dim):
        if x.ndim == 0:
            return x.clone(), torch.zeros((), dtype=torch.int64)
        indices = _along(torch.arange(x.shape[dim]), x, dim)
        return inclusive_scan(combine, dim, x, indices.expand(x.shape))

    return scan


for _target, _function in {
    aten.cumprod.default: _cumprod,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.cummax.default: _cumulative_extremum(torch.ge),
    aten.cummin.default: _cumulative_extremum(torch.le),
}.items():
    REGISTRY.decompose(_target, _function)
