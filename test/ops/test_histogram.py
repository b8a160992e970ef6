"""histc and histogram."""

import torch
from oprows import Dyn, data, edges, f32, floats, pytest_function, row

OPTIONS = {"dtypes": (f32,), "edge_verified": False}

ROWS = [
    row(
        "histc",
        cases=[
            (floats(50, low=-3, high=3), 7, -2, 2),
            (edges(), 5, -7.25, 3),
            (floats(3, 20), 10),
            (data([2.0, 2.0]), 4),
        ],
        **OPTIONS,
    ),
    row("histc/dynamic", lambda x: torch.histc(x, 4, 0, 1), floats(Dyn("n", 5)), **OPTIONS),
    row(
        "histogram.bin_ct",
        lambda x: [tuple(torch.histogram(x, 5, range=(-2.0, 2.0))), tuple(torch.histogram(x, 4))],
        floats(50),
        **OPTIONS,
    ),
]

test_op_row = pytest_function(ROWS)
