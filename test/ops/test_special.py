"""Special functions."""

import math

import torch
from oprows import data, f32, floats, ints, pytest_function, row

F32_ONLY = (f32,)
WIDE = [(floats(200, low=-9.9, high=9.9),), (floats(20, low=0, high=0.01),), (floats(20, low=5, high=300),)]
SPECIAL = data([0.0, 1.0, 2.0, 3.0, math.inf, math.nan])
POLES = data([-1.0, -2.0, -7.0, -1e-6, 1e-6, -0.5])

ROWS = [
    row("lgamma", cases=[*WIDE, (SPECIAL,), (POLES,), (ints(5, low=1, high=20),)]),
    row("digamma", cases=[*WIDE, (SPECIAL,), (POLES,)], dtypes=F32_ONLY),
    row(
        "polygamma",
        lambda x: [torch.polygamma(n, x) for n in (0, 1)],
        cases=[(floats(100, low=0.01, high=30),), (floats(50, low=-4.9, high=-4.1),)],
        dtypes=F32_ONLY,
        loose=3,
        edge_verified=False,
    ),
    row("special_erfcx", cases=[(floats(200, low=-5, high=100),), (SPECIAL,)], dtypes=F32_ONLY, loose=3),
    row("i0", cases=[(floats(100, low=-20, high=20),), (data([0.0, 80.0, -80.0, 95.0]),), (ints(5, low=-9, high=9),)]),
    row("special_modified_bessel_i0", cases=[(floats(50, low=-20, high=20),)], dtypes=F32_ONLY),
    row("special_i0e", cases=[(floats(100, low=-20, high=20),), (data([0.0, 1e4, math.inf]),)], dtypes=F32_ONLY),
    row("special_i1", cases=[(floats(100, low=-20, high=20),), (data([0.0, 80.0, -80.0]),)], dtypes=F32_ONLY),
    row("special_modified_bessel_i1", cases=[(floats(50, low=-20, high=20),)], dtypes=F32_ONLY),
    row("special_i1e", cases=[(floats(100, low=-20, high=20),), (data([1e4, -1e4]),)], dtypes=F32_ONLY),
    row(
        "program/mvlgamma",
        lambda x: torch.mvlgamma(x, 2),
        floats(9, low=1, high=9),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "program/log_ndtr",
        lambda x: torch.special.log_ndtr(x),
        floats(50, low=-9, high=4),
        dtypes=F32_ONLY,
        loose=3,
        edge_verified=False,
    ),
]

test_op_row = pytest_function(ROWS)
