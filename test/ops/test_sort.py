"""sort, argsort, topk and argpartition."""

import torch
from oprows import FLOATS, Dyn, data, f32, floats, i32, pytest_function, row, spread

N = Dyn("n", 4, also=(1, 7))
F32_ONLY = (f32,)
NUMBERS = FLOATS + (i32,)
NAN, INF = float("nan"), float("inf")
SPECIAL = data([1.0, NAN, -INF, INF, 0.0, NAN, -3.0])
TIES = data([2.0, 1.0, 2.0, 1.0, 2.0])

ROWS = [
    row(
        "sort",
        cases=[(spread(3, 5),), (spread(3, 5), 0, True)],
        once=[(SPECIAL,), (SPECIAL, 0, True), (floats(0, 3), 0), (floats(), 0, True)],
        dtypes=NUMBERS,
    ),
    row(
        "sort.stable",
        lambda x: (torch.sort(x, stable=True), torch.sort(x, stable=True, descending=True)),
        cases=[(TIES,)],
        once=[(spread(3, 5),)],
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row("argsort", lambda x: (torch.argsort(x), torch.argsort(x, 0, True)), spread(3, 5), dtypes=F32_ONLY),
    row(
        "argsort.stable",
        lambda x: torch.argsort(x, stable=True, descending=True),
        TIES,
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "topk",
        cases=[(spread(3, 5), 2), (spread(3, 5), 2, 0, False)],
        once=[(SPECIAL, 4), (SPECIAL, 4, 0, False), (spread(4), 4), (floats(3, 2), 0), (floats(), 1)],
        dtypes=NUMBERS,
    ),
    row("sort/dynamic", lambda x: torch.sort(x, 0, descending=True), floats(N), dtypes=F32_ONLY),
    row("topk/dynamic", lambda x: torch.topk(x, 1), floats(2, N), dtypes=F32_ONLY),
    # argpartition defines only the element at the partition point.
    row(
        "mlx::argpartition", lambda x: x.gather(-1, torch.ops.mlx.argpartition(x, 4))[:, 4], spread(3, 9), dtypes=FLOATS
    ),
]

test_op_row = pytest_function(ROWS)
