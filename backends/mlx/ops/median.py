"""Lowers `median`, `nanmedian` and `mode` to a sort.

If the number of elements is even, torch's median is the smaller of the two middle elements. MLX's median, which is
their mean, is therefore not used.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..extents import bounds

aten = torch.ops.aten


def _median(x, dim: int, keepdim: bool):
    """Return the values and indices of the median along `dim`.

    As in torch, the median is the first NaN if there is one.
    """
    order = torch.argsort(x, dim=dim, stable=True)
    index = order.select(dim, (x.shape[dim] - 1) // 2).unsqueeze(dim)
    if x.is_floating_point():
        is_nan = torch.isnan(x)
        first_nan = is_nan.to(torch.int32).argmax(dim, keepdim=True)
        index = torch.where(is_nan.any(dim, keepdim=True), first_nan, index)
    values = x.gather(dim, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def _check_extent(extent) -> None:
    if not isinstance(extent, int):
        raise Unsupported(
            "the median over a dynamic dimension is unsupported; use torch.sort over it and select the middle element"
        )
    if extent == 0:
        raise Unsupported("the median of an empty dimension is undefined")


@REGISTRY.lower(aten.median.default)
def median(P: Lowering, self):
    if self.ndim == 0:
        return self
    for extent in self.shape:
        _check_extent(extent)
    return P.trace(lambda x: _median(x.reshape(-1), 0, False)[0], self)[0]


@REGISTRY.lower(aten.median.dim)
def median_dim(P: Lowering, self, dim, keepdim):
    if self.ndim == 0:
        return [self, P.full([], 0, torch.int64)]
    _check_extent(self.shape[dim])
    return P.trace(_median, self, dim % self.ndim, keepdim)


def _nanmedian(x, dim: int, keepdim: bool):
    """Return the values and indices of the median along `dim` among the elements that are not NaN."""
    order = torch.argsort(x, dim=dim, stable=True)
    count = (~torch.isnan(x)).sum(dim, keepdim=True)
    index = order.gather(dim, torch.clamp((count - 1) // 2, min=0))
    values = x.gather(dim, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def _mode(x, dim: int, keepdim: bool):
    """Return the most frequent value along `dim`, and the index of its last occurrence.

    If several values are equally frequent, the smallest of them is returned, as in torch.
    """
    x = x.movedim(dim, -1)
    order = torch.argsort(x, dim=-1, stable=True)
    ordered = x.gather(-1, order)
    place = torch.arange(x.shape[-1]).expand(x.shape)
    starts = torch.nn.functional.pad(ordered[..., 1:] != ordered[..., :-1], (1, 0), value=True)
    # For each element, the number of equal elements before it.
    run = place - torch.where(starts, place, 0).cummax(-1).values
    last = run.argmax(-1, keepdim=True)
    index = order.gather(-1, last).movedim(-1, dim)
    values = ordered.gather(-1, last).movedim(-1, dim)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


@REGISTRY.lower(aten.nanmedian.default)
def nanmedian(P: Lowering, self):
    if not self.dtype.is_floating_point:
        return median(P, self)
    may_be_empty = any(bounds(extent)[0] == 0 for extent in self.shape)

    def over_all(x):
        x = x.reshape(-1)
        if may_be_empty:  # a NaN does not change the median, and is the median of an empty tensor
            x = torch.cat([x, x.new_full((1,), torch.nan)])
        return _nanmedian(x, 0, False)[0]

    return P.trace(over_all, self)[0]


@REGISTRY.lower(aten.nanmedian.dim)
def nanmedian_dim(P: Lowering, self, dim, keepdim):
    if not self.dtype.is_floating_point:
        return median_dim(P, self, dim, keepdim)
    if self.ndim == 0:
        return [self, P.full([], 0, torch.int64)]
    return P.trace(_nanmedian, self, dim % self.ndim, keepdim)


@REGISTRY.lower(aten.mode.default)
def mode(P: Lowering, self, dim, keepdim):
    if self.ndim == 0:
        return [self, P.full([], 0, torch.int64)]
    return P.trace(_mode, self, dim % self.ndim, keepdim)
