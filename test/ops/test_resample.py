"""Antialiased resampling."""

import torch.nn.functional as F
from oprows import f32, floats, pytest_function, row


def resampled(mode, **options):
    return lambda x: F.interpolate(x, mode=mode, antialias=True, **options)


OPTIONS = {"edge_verified": False, "loose": 3}

ROWS = [
    row("_upsample_bilinear2d_aa", resampled("bilinear", size=(3, 11)), floats(2, 3, 6, 8), **OPTIONS, dtypes=(f32,)),
    row("_upsample_bilinear2d_aa/scale", resampled("bilinear", scale_factor=0.4), floats(1, 2, 9, 7), **OPTIONS,
        dtypes=(f32,)),
    row("_upsample_bilinear2d_aa/corners", resampled("bilinear", size=(3, 5), align_corners=True),
        floats(1, 2, 9, 7), **OPTIONS, dtypes=(f32,)),
    row("_upsample_bicubic2d_aa", resampled("bicubic", size=(3, 11)), floats(2, 3, 6, 8), **OPTIONS, dtypes=(f32,)),
]

test_op_row = pytest_function(ROWS)
