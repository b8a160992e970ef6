"""Pooling: padding, dilation, ceil_mode, divisors, adaptive sizes, indices."""

import torch
from oprows import FLOATS, Dyn, data, f32, floats, i64, pytest_function, row, spread
from torch.nn import functional as F

F32_ONLY = (f32,)
N = Dyn("n", 3, also=(1, 5))
INF, NAN = float("inf"), float("nan")
aten = torch.ops.aten

MAX = [
    row(
        "max_pool2d_with_indices",
        cases=[
            (spread(1, 2, 7, 6), [3, 2]),
            (spread(2, 7, 6), [3], [2], [1]),
            (spread(1, 1, 8, 9), [2, 3], [3, 1], [1, 1], [2, 1]),
            (spread(1, 1, 7, 8), [3, 3], [2, 2], [1, 0], [1, 1], True),
            (spread(1, 1, 6, 6), [2, 2], [2, 2]),
        ],
        once=[
            (data([[[1.0, NAN, -INF, -INF], [2.0, 2.0, -INF, -INF]]]), [2, 2]),
            (data([[[-INF, -INF], [-INF, 1.0]]]), [2, 2], [1, 1], [1, 1]),
            (data([[[1.0, NAN, 2.0], [NAN, NAN, 4.0], [5.0, NAN, 6.0]]]), [3, 3], [1, 1], [1, 1]),
            (floats(1, 5, 5, dtype=i64, low=-9, high=9), [3, 3], [1, 1], [1, 1]),
        ],
        dtypes=FLOATS,
    ),
    row(
        "max_pool2d_with_indices/2d",
        F.max_pool2d,
        cases=[(floats(N, 2, 7, 6), 3, 2, 1), (floats(N, 2, 7, 6), 2)],
        dtypes=F32_ONLY,
    ),
    row(
        "max_pool2d_with_indices/1d",
        lambda x: (F.max_pool1d(x, 3, 2, 1, 1, True), F.max_pool1d(x, 2, return_indices=True)),
        spread(2, 3, 8),
        dtypes=F32_ONLY,
    ),
    row(
        "max_pool3d_with_indices",
        cases=[
            (spread(1, 1, 4, 5, 6), [2, 2, 2]),
            (spread(1, 4, 5, 6), [3, 2, 3], [2, 1, 2], [1, 0, 1], [1, 2, 1], True),
        ],
        dtypes=F32_ONLY,
    ),
]

AVERAGE = [
    row(
        "avg_pool1d",
        cases=[
            (floats(2, 3, 8), [2]),
            (floats(3, 9), [3], [2], [1]),
            (floats(1, 2, 8), [3], [2], [1], True, False),
            (floats(1, 2, 8), [3], [2], [1], True, True),
        ],
        dtypes=FLOATS,
    ),
    row(
        "avg_pool2d",
        cases=[
            (floats(1, 2, 7, 6), [3, 2]),
            (floats(2, 7, 6), [3], [2], [1], True),
            (floats(1, 2, 7, 6), [3, 2], [2, 2], [1, 1], True, False),
            (floats(1, 2, 7, 6), [3, 2], [2, 1], [0, 1], False, True, 5),
            (floats(1, 1, 6, 6), [2, 2]),
        ],
        once=[(data([[[1.0, INF, 1.0, NAN, 1.0, 1.0, 1.0, 1.0]]]), [1, 2])],
        dtypes=FLOATS,
    ),
    row("avg_pool2d/dynamic batch", torch.nn.AvgPool2d(3, 2, 1), floats(N, 2, 5, 5), dtypes=F32_ONLY),
    row(
        "avg_pool3d",
        cases=[
            (floats(1, 2, 4, 5, 6), [2, 2, 2]),
            (floats(2, 4, 5, 6), [3, 2, 3], [2, 1, 2], [1, 0, 1], True, False),
            (floats(1, 2, 4, 5, 6), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, 3),
        ],
        dtypes=F32_ONLY,
    ),
]

ADAPTIVE = [
    row(
        "adaptive_avg_pool1d",
        cases=[(floats(2, 3, 8), [4]), (floats(2, 3, 7), [3]), (floats(3, 4), [6])],
        dtypes=FLOATS,
    ),
    row(
        "_adaptive_avg_pool2d",
        F.adaptive_avg_pool2d,
        cases=[(floats(1, 2, 7, 6), [3, 2]), (floats(2, 7, 6), [None, 4]), (floats(1, 2, 3, 4), [5, 7])],
        dtypes=FLOATS,
    ),
    row(
        "_adaptive_avg_pool3d",
        F.adaptive_avg_pool3d,
        cases=[(floats(1, 2, 4, 7, 6), [3, 2, 6]), (floats(2, 4, 4, 6), 2)],
        dtypes=F32_ONLY,
    ),
    row(
        "adaptive_max_pool2d",
        cases=[(spread(1, 2, 7, 6), [3, 2]), (spread(2, 8, 6), [4, 3]), (spread(1, 1, 3, 4), [5, 7])],
        dtypes=FLOATS,
        edge_verified=False,
    ),
    row(
        "adaptive_max_pool2d/1d",
        lambda x: F.adaptive_max_pool1d(x, 3, return_indices=True),
        spread(2, 3, 7),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "adaptive_max_pool3d",
        cases=[(spread(1, 1, 4, 5, 6), [2, 3, 4]), (spread(2, 4, 4, 4), [2, 2, 1])],
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row("mean.dim/global average", lambda x: F.adaptive_avg_pool2d(x, 1), floats(N, 2, 5, 6), dtypes=F32_ONLY),
]

H, W = Dyn("h", 8, also=(4, 11), min=4, max=64), Dyn("w", 6, also=(17, 5), min=4, max=64)

DYNAMIC = [
    row(
        "max_pool2d_with_indices/dynamic",
        lambda x: (F.max_pool2d(x, 3, 2, 1, return_indices=True), F.max_pool2d(x, 2, 1, 1, dilation=2)),
        floats(1, 2, H, W),
        dtypes=F32_ONLY,
    ),
    row(
        "max_pool2d_with_indices/no element in a window",
        lambda x: F.max_pool2d(x, 2, 1, 1, dilation=2),
        cases=[(floats(1, 2, 4, Dyn("w", 6, also=(1, 2), min=1, max=64)),), (floats(1, 2, 1, 4),)],
        dtypes=F32_ONLY,
    ),
    row(
        "avg_pool2d/dynamic",
        lambda x: (F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, (3, 2), 2, 1, count_include_pad=False)),
        floats(1, 2, H, W),
        dtypes=F32_ONLY,
    ),
    row(
        "avg_pool2d/dynamic width",
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        floats(2, 5, W),
        dtypes=F32_ONLY,
    ),
    row(
        "_adaptive_avg_pool2d/dynamic", lambda x: F.adaptive_avg_pool2d(x, (3, 5)), floats(1, 2, H, W), dtypes=F32_ONLY
    ),
    row(
        "adaptive_max_pool2d/dynamic",
        lambda x: (F.adaptive_max_pool2d(x, (3, 5), True), F.adaptive_max_pool2d(x, 1, True)),
        floats(1, 2, H, W),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
]

ROWS = [*MAX, *AVERAGE, *ADAPTIVE, *DYNAMIC]

test_op_row = pytest_function(ROWS)
