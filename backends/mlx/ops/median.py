"""The median, which in torch is the lower of the two in the middle; MLX averages them."""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY, Unsupported

aten = torch.ops.aten


def _median(x, dim: int, keepdim: bool):
    """Values and their positions. A NaN, which sorts last, is the median of its row."""
    last = x.shape[dim] - 1
    order = torch.argsort(x, dim=dim, stable=True)
    middle = order.select(dim, last // 2).unsqueeze(dim)
    if x.is_floating_point():
        end = order.select(dim, last).unsqueeze(dim)
        middle = torch.where(torch.isnan(x.gather(dim, end)), end, middle)
    values = x.gather(dim, middle)
    return (values, middle) if keepdim else (values.squeeze(dim), middle.squeeze(dim))


def _static(x, dim: int) -> None:
    if not isinstance(x.shape[dim], int):
        raise Unsupported(f"median over axis {dim}, whose extent is dynamic")
    if x.shape[dim] == 0:
        raise Unsupported("median of nothing")


@REGISTRY.lower(aten.median.default)
def median(P, self):
    if self.ndim == 0:
        return self
    if not all(isinstance(extent, int) for extent in self.shape) or 0 in self.shape:
        raise Unsupported("median of a tensor of dynamic size, or of nothing")
    return P.trace(lambda x: _median(x.reshape(-1), 0, False)[0], self)[0]


@REGISTRY.lower(aten.median.dim)
def median_dim(P, self, dim, keepdim):
    if self.ndim == 0:
        return [self, P.full([], 0, torch.int64)]
    _static(self, dim)
    return P.trace(_median, self, dim % self.ndim, keepdim)
