"""Reflection and replication padding."""

from oprows import FLOATS, Dyn, f32, floats, pytest_function, row
from torch.nn import functional as F

N = Dyn("n", 3, also=(1, 5))
SHAPES = {1: ((2, 3, 5), [1, 2]), 2: ((1, 2, 4, 5), [1, 2, 0, 3]), 3: ((1, 1, 3, 4, 5), [1, 0, 2, 1, 1, 2])}

ROWS = [
    row(f"{kind}_pad{rank}d", floats(*shape), pad, dtypes=FLOATS if rank == 1 else (f32,))
    for kind in ("reflection", "replication")
    for rank, (shape, pad) in SHAPES.items()
] + [
    row(
        "reflection_pad2d/dynamic batch", lambda x: F.pad(x, (1, 1, 2, 2), "reflect"), floats(N, 2, 4, 5), dtypes=(f32,)
    ),
    row("replication_pad1d/dynamic batch", lambda x: F.pad(x, (1, 3), "replicate"), floats(N, 2, 4), dtypes=(f32,)),
]

test_op_row = pytest_function(ROWS)
