"""Indices of nonzero elements, from the nonzero elements of a vector.

ExecuTorch computes `nonzero`, because the size of its result depends on the data. Its kernel writes row after row, but
torch.export records that the result is column-major. Only for a vector, whose result has one column, are both the same.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten


def _nonzero(x: torch.Tensor) -> torch.Tensor:
    if x.ndim < 2:
        return NotImplemented
    rest, indices = torch.nonzero(x.reshape(-1)), []
    for size in reversed(x.shape):
        divisor = torch.sym_max(size, 1)
        indices.insert(0, rest % divisor)
        rest = rest // divisor
    return torch.cat(indices, dim=1)


def _by_axis(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.atleast_1d(x).nonzero().unbind(1)


# Decompositions of the operators that return the indices of nonzero elements.
DECOMPOSITIONS = {
    aten.nonzero.default: _nonzero,
    aten.argwhere.default: lambda x: torch.nonzero(x),
    aten.nonzero_numpy.default: _by_axis,
    aten.where.default: _by_axis,
}
