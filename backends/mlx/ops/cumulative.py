"""Decomposes cumprod, logcumsumexp, cummax and cummin.

Of the cumulative operators, the IR has only the sum. The operators here are scans, see `ops/lib/scan.py`.
"""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY
from .lib.scan import along, inclusive_scan

aten = torch.ops.aten


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
    """Return the torch function for cummax or cummin, which computes values and indices.

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
        indices = along(torch.arange(x.shape[dim]), x, dim)
        return inclusive_scan(combine, dim, x, indices.expand(x.shape))

    return scan


for _target, _function in {
    aten.cumprod.default: _cumprod,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.cummax.default: _cumulative_extremum(torch.ge),
    aten.cummin.default: _cumulative_extremum(torch.le),
}.items():
    REGISTRY.decompose(_target, _function)
