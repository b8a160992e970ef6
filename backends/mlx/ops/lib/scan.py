"""A torch function, for `P.trace`, that combines each element of a tensor with the earlier ones.

It takes log2(extent) steps. Each step doubles the number of elements that a result covers (a Hillis-Steele scan).
"""

from __future__ import annotations

import torch

from ...extents import bounds


def inclusive_scan(combine, dim, *tensors, most=None):
    """Combine each element of `tensors` with all earlier elements along `dim`. Returns a list of as many tensors.

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
    """Double the number of elements that each result covers, which is `covered` before the step."""
    rest = tensors[0].shape[dim] - covered
    head = [p.narrow(dim, 0, covered) for p in tensors]
    earlier = [p.narrow(dim, 0, rest) for p in tensors]
    later = [p.narrow(dim, covered, rest) for p in tensors]
    return [torch.cat(pair, dim) for pair in zip(head, combine(earlier, later))]


def _dynamic_step(combine, dim, covered, tensors):
    """Do the same as `_static_step` for a dynamic extent.

    It never compares the extent with `covered`, because such a comparison would restrict the extent.
    """
    x = tensors[0]
    earlier = [torch.roll(p, covered, dim) for p in tensors]
    has_earlier = along(torch.arange(x.shape[dim]) >= covered, x, dim)
    return [torch.where(has_earlier, new, old) for new, old in zip(combine(earlier, tensors), tensors)]


def along(values, x, dim):
    """Return the 1-d tensor `values` in a shape that broadcasts along axis `dim` of `x`."""
    return values.reshape([-1] + [1] * (x.ndim - 1 - dim % x.ndim))
