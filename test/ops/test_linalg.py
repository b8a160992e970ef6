"""Matrix products."""

import torch
from oprows import Dyn, f32, floats, indices, pytest_function, row

N = Dyn("n", 3, also=(1, 7))
F32_ONLY = (f32,)
LOOSE = 4  # MLX sums in another order

ROWS = [
    row("mm", cases=[(floats(3, 4), floats(4, 5)), (floats(0, 4), floats(4, 5)), (floats(3, 0), floats(0, 2))],
        loose=LOOSE),
    row("bmm", cases=[(floats(2, 3, 4), floats(2, 4, 5))], loose=LOOSE),
    row("matmul", cases=[(floats(2, 3, 4), floats(4, 5)), (floats(4), floats(4)), (floats(4), floats(4, 2)),
                         (floats(2, 1, 3, 4), floats(5, 4, 2)), (floats(3, 4), floats(4))], dtypes=F32_ONLY, loose=10),
    row("addmm", cases=[(floats(5), floats(3, 4), floats(4, 5)), (floats(3, 5), floats(3, 4), floats(4, 5))],
        loose=LOOSE),
    row("addmm/scaled", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), floats(3, 5), floats(3, 4),
        floats(4, 5), dtypes=F32_ONLY, loose=10),
    row("linear", torch.nn.functional.linear, cases=[
        (floats(2, 3, 4), floats(5, 4)), (floats(3, 4), floats(5, 4), floats(5)), (floats(4), floats(5, 4), floats(5))],
        loose=LOOSE),
    row("linear/parameters", torch.nn.Linear(4, 5), floats(2, 3, 4), loose=LOOSE),
    row("linear/dynamic", torch.nn.Linear(4, 5), floats(2, N, 4), dtypes=F32_ONLY, loose=10),
    row("bmm/dynamic", torch.bmm, floats(2, N, 4), floats(2, 4, N), dtypes=F32_ONLY, loose=10),
    row("mlx::gathered_matmul", floats(N, 1, 1, 4), floats(5, 3, 4), indices(N, 2, below=5), loose=LOOSE,
        nodes=["GatherMmNode"]),
    row("mlx::gathered_matmul/matrices", floats(2, 1, 3, 4), floats(5, 3, 4), indices(2, 2, below=5), dtypes=F32_ONLY,
        loose=10),
]

test_op_row = pytest_function(ROWS)
