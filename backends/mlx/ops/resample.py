"""Lowers interpolation between the nearest elements of each axis or to one of them, sampling at the positions of a
grid, and antialiased resampling.

Antialiased resampling becomes two matrix products, one for each axis. The matrices are constants: each is torch's own
resampling of an identity matrix.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported

aten = torch.ops.aten

# -- the size of the result ---------------------------------------------------

_MAX_DENOMINATOR = 10**6


def _output_size(x, output_size, scale_factors):
    """Return the size of the interpolated axes: `output_size`, or trunc(extent * factor) for each axis."""
    if output_size is not None:
        return output_size
    return [_scaled(extent, factor) for extent, factor in zip(x.shape[2:], scale_factors, strict=True)]


def _scaled(extent, factor):
    """Return trunc(extent * factor), with the product in float64. For a dynamic extent, computes with integers.

    Programs have no arithmetic on host floats. The integers are those of a fraction r that rounds to `factor`, and the
    result is floor(extent * r). If extent * r is no integer, its distance from an integer is at least
    1 / r.denominator, which is more than the rounding error of the product. If it is an integer k, the product in
    float64 must not be less than k. This is so if `factor` is at least r, or if it is less than r by at most a quarter
    of a unit in the last place: the product then rounds to k.
    """
    if isinstance(extent, int):
        return math.trunc(extent * factor)
    ratio = Fraction(factor).limit_denominator(_MAX_DENOMINATOR)
    is_exact = float(ratio) == factor and ratio - Fraction(factor) <= ratio / 2**54
    if not is_exact or ratio.numerator >= 2**21:  # an extent is less than 2**31, and the product must be below 2**52
        raise Unsupported(f"scale_factors: {factor} is unsupported for a dynamic dimension; make it static at export")
    return extent * ratio.numerator // ratio.denominator


# -- linear interpolation -----------------------------------------------------


def _interpolate(x, output_size, align_corners, *scales):
    """Interpolate linearly along the last axes, one for each element of `output_size`.

    Both neighbours are multiplied by their weights, as in torch's kernels. torch's own decomposition computes
    a + (b - a) * weight instead, which is NaN if a and b are the same infinite number.
    """
    y = x.float() if x.is_floating_point() else x.to(torch.get_default_dtype())
    axes = range(x.ndim - len(output_size), x.ndim)
    for axis, size, scale in reversed(list(zip(axes, output_size, scales, strict=True))):
        extent = x.shape[axis]
        if isinstance(size, int) and size == extent:
            continue  # torch ignores the scale if it keeps the extent
        target = torch.arange(size).to(torch.float32)
        if align_corners:
            source = target * (_ratio(extent - 1, size - 1) if size > 1 else 0.0)
        else:
            source = (target + 0.5) * (1.0 / scale if scale is not None and scale > 0 else _ratio(extent, size)) - 0.5
        source = source.clamp(min=0.0)
        first = source.to(torch.int64)
        second = (first + 1).clamp(max=extent - 1)
        weight = (source - first).clamp(0.0, 1.0).reshape(-1, *[1] * (x.ndim - 1 - axis))
        y = y.index_select(axis, first) * (1 - weight) + y.index_select(axis, second) * weight
    return y.to(x.dtype) if x.is_floating_point() else y.round().to(x.dtype)


def _ratio(a, b):
    """Return a / b. If an extent is dynamic, this is a tensor, because programs have no arithmetic on host floats."""
    if isinstance(a, int) and isinstance(b, int):
        return a / b
    return torch.full((), a, dtype=torch.float32) / torch.full((), b, dtype=torch.float32)


def _interpolate_vec(x, output_size, align_corners, scale_factors):
    """`_interpolate` with the arguments of the overload `vec`."""
    size = _output_size(x, output_size, scale_factors)
    return _interpolate(x, size, align_corners, *(scale_factors or [None] * len(size)))


def _with_optional_scales(axes):
    def function(x, output_size, align_corners, *scales):
        return _interpolate(x, output_size, align_corners, *scales, *[None] * (axes - len(scales)))

    return function


for _axes, _packet in enumerate((aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d), start=1):
    REGISTRY.decompose(_packet.default, _with_optional_scales(_axes))
    REGISTRY.decompose(_packet.vec, _interpolate_vec)

# -- nearest elements ---------------------------------------------------------


def _nearest(offset, x, output_size, *scales):
    """Take the nearest elements along the last axes, one for each element of `output_size`.

    `offset` is the distance of an element from its index: 0, or 0.5 for the mode "nearest-exact".
    """
    for axis, size, scale in zip(range(x.ndim - len(output_size), x.ndim), output_size, scales, strict=True):
        extent = x.shape[axis]
        if offset == 0 and len(output_size) == 2 and isinstance(size, int) and size in (extent, 2 * extent):
            scale = None  # torch's kernel for images ignores the scale in these two cases
        ratio = 1.0 / scale if scale is not None and scale > 0 else _ratio(extent, size)
        source = (torch.arange(size).to(torch.float32) + offset) * ratio
        x = x.index_select(axis, source.to(torch.int64).clamp(max=extent - 1))
    return x


def _nearest_overloads(offset, axes):
    """Return the decompositions of the overloads `default` and `vec`."""

    def default(x, output_size, *scales):
        return _nearest(offset, x, output_size, *scales, *[None] * (axes - len(scales)))

    def vec(x, output_size, scale_factors):
        size = _output_size(x, output_size, scale_factors)
        return _nearest(offset, x, size, *(scale_factors or [None] * axes))

    return default, vec


for _offset, _packets in (
    (0, (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d)),
    (0.5, (aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d)),
):
    for _axes, _packet in enumerate(_packets, start=1):
        for _overload, _function in zip((_packet.default, _packet.vec), _nearest_overloads(_offset, _axes)):
            REGISTRY.decompose(_overload, _function)

# -- sampling at the positions of a grid ---------------------------------------

_BILINEAR, _NEAREST, _BICUBIC = range(3)  # torch's numbers of the modes, and of the kinds of padding
_ZEROS, _BORDER, _REFLECTION = range(3)


def _grid_sample(x, grid, mode, padding, align_corners):
    """Sample the images x [N, C, *extents] at positions in [-1, 1], of which the last axis of `grid` is the last one.

    A sample is the sum of taps: elements of x times weights. The taps of a position are all combinations of the taps
    along each axis.
    """
    extents, axes = x.shape[2:], x.ndim - 2
    taps = [
        _taps(grid[..., axes - 1 - axis].float(), extent, mode, padding, align_corners)
        for axis, extent in enumerate(extents)
    ]
    pixels = x.float().flatten(2).transpose(1, 2).flatten(0, 1)  # [N * positions in an image, C]
    first = (torch.arange(x.shape[0]) * math.prod(extents)).reshape(-1, *[1] * axes)  # the first pixel of each image
    samples = 0
    for combination in itertools.product(*taps):
        position, weight, is_inside = 0, None, None
        for extent, (index, factor) in zip(extents, combination, strict=True):
            inside = (index >= 0) & (index < extent)
            is_inside = inside if is_inside is None else is_inside & inside
            position = position * extent + index.clamp(0, extent - 1).to(torch.int64)
            if factor is not None:
                weight = factor if weight is None else weight * factor
        values = pixels[(first + position).reshape(-1)].reshape(*position.shape, -1)
        values = torch.where(is_inside[..., None], values, 0.0)
        samples = samples + (values if weight is None else values * weight[..., None])
    return samples.movedim(-1, 1).to(x.dtype)


def _taps(position, extent, mode, padding, align_corners):
    """Return the taps along one axis: float tensors of indices, and their weights. A weight of None is 1."""
    if align_corners:
        position = (position + 1) * (extent - 1) * 0.5
    else:
        position = (position + 1) * extent * 0.5 - 0.5

    def padded(index):
        return _padded(index, extent, padding, align_corners)

    if mode == _NEAREST:
        return [(padded(position).round(), None)]
    if mode == _BILINEAR:
        position = padded(position)
        index = position.floor()
        weight = position - index
        return [(index, 1 - weight), (index + 1, weight)]
    index = position.floor()
    return [(padded(index + i - 1), w) for i, w in enumerate(_cubic_weights(position - index))]


def _padded(index, extent, padding, align_corners):
    """Move indices that are outside of the axis into it, as the kind of padding says."""
    if padding == _ZEROS:
        return index
    if padding == _REFLECTION:
        low = 0.0 if align_corners else -0.5  # the axis ends at the centers of its elements, or at their edges
        span = torch.sym_max(2 * (extent - 1), 1) if align_corners else 2 * extent
        distance = torch.fmod((index - low).abs(), span)
        index = torch.minimum(distance, span - distance) + low
    return index.clamp(0, extent - 1)


def _cubic_weights(t, a=-0.75):
    """Return the weights of the four neighbours of a position that is `t` after the second one (Keys, 1981)."""

    def near(d):
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d):
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


REGISTRY.decompose(aten.grid_sampler_2d.default, _grid_sample)
REGISTRY.decompose(aten.grid_sampler_3d.default, _grid_sample)

# -- antialiased resampling ---------------------------------------------------


def _matrix(target, extent, size, align_corners, scale):
    """Return the matrix [extent, size] that resamples an axis."""
    if not (isinstance(extent, int) and isinstance(size, int)):
        raise Unsupported("antialiasing of a dynamic dimension is unsupported; make it static at export")
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        return target(torch.eye(extent)[None, None], [extent, size], align_corners, None, scale)[0, 0]


def _resampling(target):
    def lower(P: Lowering, self, output_size, align_corners, scales_h=None, scales_w=None):
        height, width = self.shape[-2:]
        rows = _matrix(target, height, output_size[0], align_corners, scales_h).to(self.dtype)
        columns = _matrix(target, width, output_size[1], align_corners, scales_w).to(self.dtype)
        constants = P.constant("rows", rows.T.contiguous()), P.constant("columns", columns)
        return P.trace(lambda x, rows, columns: rows @ x @ columns, self, *constants)[0]

    return lower


for _target in (aten._upsample_bilinear2d_aa.default, aten._upsample_bicubic2d_aa.default):
    REGISTRY.add(_target, _resampling(_target))
