"""The composite operators of `custom_kernel_ops`."""

import torch
from oprows import Dyn, bools, f32, floats, i32, indices, ints, pytest_function, row

F32_ONLY = (f32,)
N = Dyn("n", 2, also=(1, 3))

ROWS = [
    row(
        "mlx::sample",
        lambda x, t, p, s: torch.ops.mlx.sample(x, t, p, s),
        floats(N, 50),
        floats(low=0.5, high=1, dtype=f32),
        floats(low=0.5, high=1, dtype=f32),
        ints(low=0, high=99),
        dtypes=F32_ONLY,
        edge_verified=False,
        nodes=["SampleNode"],
    ),
    row(
        "mlx::penalize_logits",
        lambda x, h, v, *p: torch.ops.mlx.penalize_logits(x, h, v, *p),
        floats(N, 50),
        indices(N, 12, low=-5, below=55),
        bools(N, 12),
        *[floats(low=0.5, high=2, dtype=f32)] * 3,
        edge_verified=False,
    ),
    row(
        "mlx::bias_logits",
        lambda x, t, b: torch.ops.mlx.bias_logits(x, t, b),
        floats(N, 50),
        indices(7, low=-5, below=55),
        floats(7, dtype=f32),
        edge_verified=False,
    ),
    row(
        "mlx::mask_logits",
        lambda x, a: torch.ops.mlx.mask_logits(x, a),
        floats(N, 50),
        ints(N, 2, low=-(2**31), high=2**31, dtype=i32),
        edge_verified=False,
        nodes=["MaskLogitsNode"],
    ),
]

test_op_row = pytest_function(ROWS)
