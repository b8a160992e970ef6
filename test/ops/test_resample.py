"""Linear interpolation, nearest elements, samples at the positions of a grid, and antialiased resampling."""

import torch
import torch.nn.functional as F
from oprows import Dyn, data, f32, floats, pytest_function, row


def resampled(mode, **options):
    return lambda x: F.interpolate(x, mode=mode, antialias=True, **options)


def interpolated(mode, **options):
    return lambda x: F.interpolate(x, mode=mode, **options)


def with_infinities(*shape):
    """Random numbers, some of which are replaced by infinities and NaN."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x.view(-1)[::3] = torch.inf
    x.view(-1)[1::7] = -torch.inf
    x.view(-1)[::11] = torch.nan
    return data(x.tolist())


def sampled(*options):
    """Return a function that samples images at the positions of a grid, once with each of `options`."""
    return lambda x, grid: [F.grid_sample(x, grid, mode, padding, corners) for mode, padding, corners in options]


GRID_OPTIONS = (
    ("bilinear", "zeros", False),
    ("bilinear", "reflection", True),
    ("nearest", "border", True),
    ("bicubic", "zeros", True),
    ("bicubic", "reflection", False),
)
ANTIALIASED = {"edge_verified": False, "loose": 3}

ROWS = [
    row("upsample_linear1d.vec", interpolated("linear", scale_factor=2), floats(2, 3, 5), loose=10),
    row(
        "upsample_linear1d.vec/infinite",
        interpolated("linear", scale_factor=2),
        with_infinities(2, 3, 14),
        dtypes=(f32,),
        loose=10,
    ),
    row("upsample_linear1d.vec/shorter", interpolated("linear", size=4, align_corners=True), floats(2, 3, 9), loose=10),
    *(
        row(
            f"upsample_{mode}/dynamic size and float scale",
            interpolated(function, scale_factor=factor),
            floats(1, 2, Dyn("n", 5, also=(3, 10)), 4),
            dtypes=(f32,),
            loose=10,
        )
        for mode, function, factor in (("nearest2d.vec", "nearest", 1.7), ("bilinear2d.vec", "bilinear", 1.6))
    ),
    row("upsample_linear1d.vec/dynamic", interpolated("linear", scale_factor=2), floats(2, 3, Dyn("n", 5)), loose=10),
    row("upsample_bilinear2d.vec", interpolated("bilinear", scale_factor=2), floats(1, 2, 3, 4), loose=10),
    row(
        "upsample_bilinear2d.vec/scales",
        interpolated("bilinear", scale_factor=(1.7, 0.6)),
        floats(1, 2, 5, 7),
        loose=10,
    ),
    row("upsample_bilinear2d.vec/same size", interpolated("bilinear", scale_factor=1.3), floats(1, 2, 3, 4), loose=10),
    row(
        "upsample_bilinear2d.vec/infinite",
        interpolated("bilinear", scale_factor=2),
        with_infinities(1, 2, 5, 7),
        dtypes=(f32,),
        loose=10,
    ),
    row(
        "upsample_bilinear2d",
        lambda x: torch.ops.aten.upsample_bilinear2d(x, [5, 6], True),
        floats(1, 2, 3, 4),
        dtypes=(f32,),
        loose=10,
        traced=True,
    ),
    row(
        "upsample_linear1d",
        lambda x: torch.ops.aten.upsample_linear1d(x, [4], False),
        floats(2, 3, 9),
        dtypes=(f32,),
        loose=10,
        traced=True,
    ),
    row(
        "upsample_trilinear3d",
        lambda x: torch.ops.aten.upsample_trilinear3d(x, [5, 3, 2], False, 1.7),
        floats(1, 2, 3, 4, 2),
        dtypes=(f32,),
        loose=10,
        traced=True,
    ),
    row("upsample_trilinear3d.vec", interpolated("trilinear", scale_factor=2), floats(1, 2, 3, 4, 2), loose=10),
    row(
        "upsample_trilinear3d.vec/size",
        interpolated("trilinear", size=(2, 7, 3), align_corners=True),
        floats(1, 2, 3, 4, 2),
        loose=10,
    ),
    *(
        row(f"{name}{axes}d.vec{case}", interpolated(mode, **options), floats(1, 2, *shape))
        for name, mode in (("upsample_nearest", "nearest"), ("_upsample_nearest_exact", "nearest-exact"))
        for axes, case, options, shape in (
            (1, "", {"size": 7}, (5,)),
            (1, "/same size", {"scale_factor": 1.1}, (5,)),
            (1, "/dynamic", {"scale_factor": 2}, (Dyn("n", 5, also=(1,)),)),
            (2, "", {"size": (6, 5)}, (3, 4)),
            (2, "/same size", {"scale_factor": 1.1}, (5, 3)),
            (2, "/twice the size", {"scale_factor": 2.1}, (4, 3)),
            (3, "", {"scale_factor": (1.7, 0.6, 3)}, (5, 7, 2)),
        )
    ),
    row(
        "upsample_nearest2d.vec/another size",
        lambda x, y: F.interpolate(x, size=y.shape[2:]),
        floats(1, 2, Dyn("n", 5, also=(3, 10)), 4),
        floats(1, 1, Dyn("m", 7, also=(3, 9)), 3),
    ),
    *(
        row(
            f"{name}{axes}d",
            lambda x, name=name, n=axes: getattr(torch.ops.aten, f"{name}{n}d")(x, [5, 6, 3][:n]),
            floats(1, 2, *(3, 4, 2)[:axes]),
        )
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for axes in (1, 2, 3)
    ),
    row(
        "_upsample_bilinear2d_aa", resampled("bilinear", size=(3, 11)), floats(2, 3, 6, 8), **ANTIALIASED, dtypes=(f32,)
    ),
    row(
        "_upsample_bilinear2d_aa/scale",
        resampled("bilinear", scale_factor=0.4),
        floats(1, 2, 9, 7),
        **ANTIALIASED,
        dtypes=(f32,),
    ),
    row(
        "_upsample_bilinear2d_aa/corners",
        resampled("bilinear", size=(3, 5), align_corners=True),
        floats(1, 2, 9, 7),
        **ANTIALIASED,
        dtypes=(f32,),
    ),
    row("_upsample_bicubic2d_aa", resampled("bicubic", size=(3, 11)), floats(2, 3, 6, 8), **ANTIALIASED, dtypes=(f32,)),
    row(
        "grid_sampler_2d",
        sampled(*GRID_OPTIONS),
        floats(2, 3, 4, 5),
        floats(2, 3, 2, 2, low=-2, high=2),
        dtypes=(f32,),
        loose=10,
    ),
    row(
        "grid_sampler_2d/dynamic",
        sampled(*GRID_OPTIONS),
        floats(1, 3, Dyn("h", 4, also=(1, 6)), 5),
        floats(1, Dyn("n", 3, also=(1, 5)), 2, 2, low=-2, high=2),
        dtypes=(f32,),
        loose=10,
    ),
    row(
        "grid_sampler_2d/infinite",
        sampled(GRID_OPTIONS[0]),
        with_infinities(1, 2, 5, 7),
        floats(1, 3, 2, 2, low=-2, high=2),
        dtypes=(f32,),
        loose=10,
    ),
    row(
        "grid_sampler_3d",
        sampled(*GRID_OPTIONS[:3]),
        floats(2, 3, 4, 5, 2),
        floats(2, 3, 2, 1, 3, low=-2, high=2),
        dtypes=(f32,),
        loose=10,
        edge_verified=False,
    ),
]

test_op_row = pytest_function(ROWS)
