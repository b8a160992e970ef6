"""Running results along an axis, by doubling: MLX's wire has the running sum only."""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY

aten = torch.ops.aten


def _running(combine, dim, *parts):
    """`combine(earlier, later)` over all that stand up to each place, in log2(extent) steps."""
    extent, reach = parts[0].shape[dim], 1
    while reach < extent:
        head = [p.narrow(dim, 0, reach) for p in parts]
        earlier = [p.narrow(dim, 0, extent - reach) for p in parts]
        later = [p.narrow(dim, reach, extent - reach) for p in parts]
        tail = combine(earlier, later)
        parts = [torch.cat(pair, dim) for pair in zip(head, tail)]
        reach *= 2
    return parts


def _cumprod(x, dim, dtype=None):
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() else torch.int64
    x = x.to(dtype)
    return _running(lambda a, b: [a[0] * b[0]], dim, x)[0] if x.ndim else x.clone()


def _logcumsumexp(x, dim):
    return _running(lambda a, b: [torch.logaddexp(a[0], b[0])], dim, x)[0] if x.ndim else x.clone()


def _extreme(is_beyond):
    """Values and their positions: of equal ones the last, and a NaN wins."""

    def later_wins(earlier, later):
        (x, i), (y, j) = earlier, later
        wins = is_beyond(y, x)
        if y.is_floating_point():
            wins = wins | torch.isnan(y)
        return [torch.where(wins, y, x), torch.where(wins, j, i)]

    def text(x, dim):
        if x.ndim == 0:
            return x.clone(), torch.zeros((), dtype=torch.int64)
        places = torch.arange(x.shape[dim]).reshape([-1] + [1] * (x.ndim - 1 - dim % x.ndim))
        return _running(later_wins, dim, x, places.expand(x.shape))

    return text


for _target, _text in {
    aten.cumprod.default: _cumprod,
    aten.logcumsumexp.default: _logcumsumexp,
    aten.cummax.default: _extreme(torch.ge),
    aten.cummin.default: _extreme(torch.le),
}.items():
    REGISTRY.spell(_target, _text)
