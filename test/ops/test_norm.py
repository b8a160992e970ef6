"""Normalization over the last axis."""

import torch
from oprows import Dyn, f32, floats, row, tests

N = Dyn("n", 3, also=(1, 7))
ONE = (f32,)

ROWS = [
    row("rms_norm", torch.nn.functional.rms_norm, cases=[
        (floats(2, 3, 8), [8], floats(8), 1e-5), (floats(3, 8), [8]), (floats(8), [8], None, 1e-2)],
        loose=2),
    row("rms_norm/dynamic", torch.nn.RMSNorm(8), floats(2, N, 8), dtypes=ONE),
    row("layer_norm", torch.nn.functional.layer_norm, cases=[
        (floats(2, 3, 8), [8], floats(8), floats(8)), (floats(3, 8), [8]), (floats(3, 8), [8], floats(8))],
        loose=2),
    row("layer_norm/parameters", torch.nn.LayerNorm(8), floats(2, N, 8), dtypes=ONE, loose=2),
]

test_row = tests(ROWS)
