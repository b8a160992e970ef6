"""gcd and lcm."""

import torch
from oprows import data, i32, i64, ints, pytest_function, row

SCAN = {"nodes": ["ScanNode"], "edge_verified": False}
# Two pairs for which Euclid's algorithm takes 43 and 60 steps.
SLOW_PAIRS = data([1134903170, 7540113804746346429 // 2]), data([701408733, 4660046610375530309])
DTYPES = (i64, i32, torch.int16)

ROWS = [
    row(
        "gcd",
        cases=[
            (ints(40, low=-100, high=100, dtype=None), ints(40, low=-100, high=100, dtype=None)),
            (ints(3, 4, low=0, high=3, dtype=None), ints(4, low=0, high=3, dtype=None)),
        ],
        dtypes=DTYPES,
        **SCAN,
    ),
    row("gcd/many steps", lambda x, y: torch.gcd(x, y), *SLOW_PAIRS, **SCAN),
    row(
        "gcd/lowest integer",
        lambda x, y: torch.gcd(x, y),
        data([-128, -128, -128, 3, 6, 0, 3], dtype=torch.int8),
        data([6, 0, -128, -128, -128, -128, -127], dtype=torch.int8),
        **SCAN,
    ),
    row(
        "lcm",
        cases=[(ints(40, low=-100, high=100, dtype=None), ints(40, low=-100, high=100, dtype=None))],
        dtypes=DTYPES,
        **SCAN,
    ),
    row(
        "lcm/overflow",
        lambda x, y: torch.lcm(x, y),
        data([-127, 100, 7], dtype=torch.int8),
        data([2, 64, -5], dtype=torch.int8),
        **SCAN,
    ),
]

test_op_row = pytest_function(ROWS)
