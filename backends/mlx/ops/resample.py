"""Lowers antialiased resampling of images to two matrix products, one for each axis.

The matrices are constants: each is torch's own resampling of an identity matrix.
"""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY, Unsupported

aten = torch.ops.aten


def _matrix(target, extent, size, align_corners, scale):
    """Returns the matrix [extent, size] that resamples an axis."""
    if not (isinstance(extent, int) and isinstance(size, int)):
        raise Unsupported("antialiasing of a dynamic dimension is unsupported; make it static at export")
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return target(torch.eye(extent)[None, None], [extent, size], align_corners, None, scale)[0, 0]


def _resampling(target):
    def lower(P, self, output_size, align_corners, scales_h=None, scales_w=None):
        height, width = self.shape[-2:]
        rows = _matrix(target, height, output_size[0], align_corners, scales_h).to(self.dtype)
        columns = _matrix(target, width, output_size[1], align_corners, scales_w).to(self.dtype)
        constants = P.constant("rows", rows.T.contiguous()), P.constant("columns", columns)
        return P.trace(lambda x, rows, columns: rows @ x @ columns, self, *constants)[0]

    return lower


for _target in (aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default):
    REGISTRY.add(_target, _resampling(_target))
