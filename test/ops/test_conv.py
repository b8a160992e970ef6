"""Convolutions: window, groups, bias, weights as inputs and as parameters."""

import torch
from oprows import FLOATS, Dyn, f16, f32, floats, pytest_function, row
from torch.nn import functional as F

F32_ONLY = (f32,)
N = Dyn("n", 3, also=(1, 5))
L = Dyn("l", 9, also=(7, 12), min=6)

NOT_TRANSPOSED = [
    row(
        "convolution/1d",
        F.conv1d,
        cases=[
            (floats(2, 4, 9), floats(6, 4, 3), floats(6)),
            (floats(2, 4, 9), floats(6, 2, 3), None, 2, 1, 2, 2),
            (floats(4, 9), floats(4, 1, 2), floats(4), 1, "same", 3, 4),
            (floats(0, 4, 9), floats(6, 4, 3)),
        ],
        dtypes=FLOATS,
        loose=4,
    ),
    row(
        "convolution/2d",
        F.conv2d,
        cases=[
            (floats(2, 4, 7, 6), floats(6, 4, 3, 2), floats(6)),
            (floats(2, 4, 7, 6), floats(6, 2, 3, 2), floats(6), (2, 1), (1, 2), (2, 1), 2),
            (floats(4, 5, 5), floats(4, 1, 3, 3), None, 1, 1, 1, 4),
            (floats(1, 3, 4, 4), floats(2, 3, 1, 1)),
        ],
        dtypes=FLOATS,
        loose=6,
    ),
    row(
        "convolution/3d",
        F.conv3d,
        cases=[
            (floats(2, 2, 4, 5, 6), floats(4, 2, 2, 3, 2), floats(4)),
            (floats(1, 2, 6, 5, 6), floats(4, 1, 2, 3, 2), floats(4), (2, 1, 3), (1, 0, 2), (2, 1, 1), 2),
        ],
        dtypes=(f32, f16),
        loose=6,
    ),
]

DEPTHWISE = [
    row("convolution/depthwise 1d", F.conv1d, floats(N, 19, 30), floats(19, 1, 5), None, 2, 7, 3, 19, dtypes=FLOATS),
    row(
        "convolution/depthwise 2d",
        F.conv2d,
        floats(2, 33, 4, L),
        floats(33, 1, 3, 2),
        None,
        (2, 1),
        (1, 2),
        (1, 2),
        33,
        dtypes=FLOATS,
        loose=4,
    ),
    row(
        "convolution/one channel 3d",
        F.conv3d,
        floats(2, 1, 4, 5, 12),
        floats(1, 1, 2, 3, 3),
        None,
        (1, 2, 1),
        (1, 0, 2),
        (2, 1, 1),
        dtypes=F32_ONLY,
        loose=4,
    ),
]

# Groups of which several fit in a vector, and groups that are products of their own.
GROUPS = [
    row(
        "convolution/small groups 1d",
        F.conv1d,
        floats(N, 20, 30),
        floats(20, 4, 5),
        None,
        2,
        7,
        3,
        5,
        dtypes=FLOATS,
        loose=6,
    ),
    row(
        "convolution/small groups 2d",
        F.conv2d,
        floats(2, 9, 4, L),
        floats(24, 3, 3, 2),
        None,
        (2, 1),
        (1, 2),
        (1, 2),
        3,
        dtypes=FLOATS,
        loose=6,
    ),
    row(
        "convolution/several results of a channel",
        F.conv2d,
        floats(N, 6, 5, L),
        floats(12, 1, 3, 3),
        None,
        1,
        1,
        1,
        6,
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/groups 2d",
        F.conv2d,
        floats(N, 40, 5, L),
        floats(34, 20, 3, 3),
        None,
        1,
        (1, 3),
        (1, 3),
        2,
        dtypes=FLOATS,
        loose=30,
    ),
]

# Products of rows that are longer, and of matrices that are wider, than what a kernel computes at once.
WIDE = [
    row(
        "convolution/wide 1d",
        F.conv1d,
        floats(N, 70, L),
        floats(67, 70, 9),
        floats(67),
        1,
        5,
        dtypes=F32_ONLY,
        loose=30,
    ),
    row("convolution/wide, 1x1", F.conv2d, floats(N, 530, 3, L), floats(70, 530, 1, 1), None, dtypes=FLOATS, loose=30),
]

DILATED = [
    row("convolution/dilated 1d", F.conv1d, floats(N, 4, L), floats(6, 4, 3), None, 2, 4, 3, dtypes=FLOATS, loose=6),
    row(
        "convolution/dilated 2d",
        F.conv2d,
        floats(N, 3, 7, L),
        floats(5, 3, 3, 2),
        None,
        (1, 2),
        (2, 1),
        (2, 3),
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/dilated 3d",
        F.conv3d,
        floats(2, 2, 5, 6, 7),
        floats(3, 2, 2, 3, 2),
        None,
        (2, 1, 1),
        (1, 2, 0),
        (2, 1, 3),
        dtypes=F32_ONLY,
        loose=4,
    ),
]

# Transposed convolutions that the runtime computes as plain ones.
PHASES = [
    row(
        "convolution/phases 1d",
        F.conv_transpose1d,
        cases=[
            (floats(N, 4, L), floats(4, 3, 7), floats(3), 3, 2, 2),
            (floats(2, 4, L), floats(4, 3, 5), None, 2, 5),
            (floats(2, 4, 5), floats(4, 3, 4), floats(3), 1, 3),
            (floats(2, 4, 5), floats(4, 3, 2), None, 2, 0, 1),
        ],
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/phases 2d",
        F.conv_transpose2d,
        floats(2, 4, 5, 6),
        floats(4, 3, 4, 5),
        floats(3),
        (2, 3),
        (1, 4),
        (1, 2),
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/phases of groups",
        F.conv_transpose2d,
        floats(N, 6, L, 6),
        floats(6, 4, 4, 3),
        floats(12),
        (2, 3),
        (1, 2),
        (1, 0),
        3,
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/phases 3d",
        F.conv_transpose3d,
        floats(1, 2, 3, 4, 2),
        floats(2, 3, 2, 3, 2),
        floats(3),
        (2, 3, 1),
        (0, 1, 1),
        (1, 2, 0),
        dtypes=F32_ONLY,
        loose=4,
    ),
]

TRANSPOSED = [
    row(
        "convolution/transposed 1d",
        F.conv_transpose1d,
        cases=[
            (floats(2, 4, 5), floats(4, 3, 3), floats(3)),
            (floats(2, 4, 5), floats(4, 3, 3), floats(6), 3, 1, 2, 2, 2),
            (floats(2, 4, 5), floats(4, 3, 1), None, 1, 1),
            (floats(2, 4, L), floats(4, 3, 2), floats(3), 3, 4, 1, 1, 2),
        ],
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/transposed 2d",
        F.conv_transpose2d,
        cases=[
            (floats(2, 4, 5, 4), floats(4, 3, 3, 2), floats(3)),
            (floats(2, 4, 5, 4), floats(4, 3, 3, 2), floats(6), (3, 2), (1, 2), (2, 1), 2, (1, 2)),
            (floats(4, 5, 4), floats(4, 1, 3, 3), None, 2, 1, 1, 4),
            (floats(2, 4, 5, 4), floats(4, 3, 1, 2), floats(6), (2, 3), (1, 2), (1, 0), 2),
        ],
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/transposed 3d",
        F.conv_transpose3d,
        cases=[
            (floats(1, 2, 3, 4, 2), floats(2, 3, 2, 3, 2), floats(3)),
            (floats(1, 2, 3, 4, 2), floats(2, 3, 2, 3, 2), floats(6), (2, 3, 1), (0, 1, 1), (1, 2, 0), 2, (1, 1, 2)),
            (floats(1, 2, 3, 4, 2), floats(2, 3, 1, 3, 2), None, 2, (1, 0, 2), 0, 2),
        ],
        dtypes=F32_ONLY,
        loose=4,
    ),
]

MODULES = [
    row(
        "convolution/parameters",
        torch.nn.Conv2d(4, 6, 3, padding=1, groups=2),
        floats(N, 4, 5, L),
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/parameters, no bias",
        torch.nn.Conv1d(4, 6, 3, stride=2, bias=False),
        floats(N, 4, L),
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/parameters, transposed",
        torch.nn.ConvTranspose2d(4, 6, (3, 2), 2, 1, 1, groups=2),
        floats(N, 4, 5, 4),
        dtypes=F32_ONLY,
        loose=4,
    ),
    row(
        "convolution/padding mode",
        torch.nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
        floats(1, 2, 5, 4),
        dtypes=F32_ONLY,
        loose=4,
    ),
]

ROWS = [*NOT_TRANSPOSED, *DEPTHWISE, *GROUPS, *WIDE, *DILATED, *TRANSPOSED, *PHASES, *MODULES]

test_op_row = pytest_function(ROWS)
