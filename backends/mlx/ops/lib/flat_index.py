"""Torch functions, for `P.trace`, that combine index tensors of several axes to an index into the flattened axes."""

from __future__ import annotations

import torch


def _positions(index, extent):
    """Return the positions, from 0 on, that `index` refers to on an axis of `extent` elements.

    The runtime checks or clamps the index of this lookup. A combined index that is out of range on one axis could be
    that of a neighbouring element.
    """
    return torch.ops.aten.index.Tensor(torch.arange(extent), [index.to(torch.int64)])


def flat_index(x, axes, indices):
    """Return the index into the flattened `axes` of `x`. `indices` has one index tensor for each of the axes."""
    flat = 0
    for axis, index in zip(axes, indices, strict=True):
        flat = flat * x.shape[axis] + _positions(index, x.shape[axis])
    return flat


def flat_element_index(x, dim, index):
    """Return, for each element of `index`, the index of the element of the flattened `x` to which `scatter` writes."""
    if x.dim() == 0:
        return torch.zeros_like(index)
    flat = 0
    for axis, extent in enumerate(x.shape):
        if axis == dim:
            position = _positions(index, extent)
        else:
            shape = [-1 if a == axis else 1 for a in range(x.dim())]
            position = torch.arange(index.shape[axis]).reshape(shape)
        flat = flat * extent + position
    return flat
