"""Operators that lower by being traced."""

import torch
import torch.nn.functional as F
from oprows import Dyn, bools, edges, f32, floats, i32, indices, ints, row, checks

ONE = (f32,)
N = Dyn("n", 2, also=(1, 3))

ROWS = [
    row("elu", cases=[(edges(),), (floats(2, 3), 0.5, 2.0)], dtypes=ONE),
    row("hardtanh", cases=[(edges(),), (floats(2, 3), -2, 0.5)], dtypes=ONE),
    row("leaky_relu", cases=[(edges(),), (floats(2, 3), 0.2)], dtypes=ONE, signed_zero=False),
    row("addmv", cases=[(floats(3), floats(3, 4), floats(4))], dtypes=ONE, loose=10, traced=True),
    row("native_layer_norm", lambda x, w, b: torch.native_layer_norm(x, [3, 4], w, b, 1e-5),
        floats(2, 3, 4), floats(3, 4), floats(3, 4), dtypes=ONE, loose=10),
    row("_native_batch_norm_legit.no_stats", lambda x: F.instance_norm(x), floats(2, 3, 4, 4), dtypes=ONE, loose=10),
    row("grid_sampler_2d", lambda x, g: F.grid_sample(x, g, align_corners=False), floats(1, 2, 4, 4),
        floats(1, 3, 3, 2, low=-0.9, high=0.9), dtypes=ONE, loose=10),
    row("upsample_bilinear2d.vec", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), floats(1, 2, 3, 4),
        dtypes=ONE, loose=10),
    row("upsample_bilinear2d", lambda x: torch.ops.aten.upsample_bilinear2d(x, [5, 6], True), floats(1, 2, 3, 4),
        dtypes=ONE, loose=10, traced=True),
    row("upsample_nearest2d.vec", lambda x: F.interpolate(x, size=(6, 5)), floats(1, 2, 3, 4), dtypes=ONE),
    row("mlx::sample", lambda x, t, p, s: torch.ops.mlx.sample(x, t, p, s), floats(N, 50), floats(low=0.5, high=1, dtype=f32),
        floats(low=0.5, high=1, dtype=f32), ints(low=0, high=99),
        dtypes=ONE, verified=False),
    row("mlx::penalize_logits", lambda x, h, v, *p: torch.ops.mlx.penalize_logits(x, h, v, *p), floats(N, 50),
        indices(N, 12, low=-5, below=55), bools(N, 12), *[floats(low=0.5, high=2, dtype=f32)] * 3, verified=False),
    row("mlx::bias_logits", lambda x, t, b: torch.ops.mlx.bias_logits(x, t, b), floats(N, 50),
        indices(7, low=-5, below=55), floats(7, dtype=f32), verified=False),
    row("mlx::mask_logits", lambda x, a: torch.ops.mlx.mask_logits(x, a), floats(N, 50),
        ints(N, 2, low=-(2**31), high=2**31, dtype=i32), verified=False),
]

test_row = checks(ROWS)
