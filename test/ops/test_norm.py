"""Normalization and norms."""

import torch
from oprows import Dyn, data, f32, floats, pytest_function, row

N = Dyn("n", 3, also=(1, 7))
F32_ONLY = (f32,)


def large_mean():
    """A BatchNorm whose mean is large compared with its standard deviation."""
    norm = torch.nn.BatchNorm1d(3).eval()
    norm.running_mean.copy_(torch.tensor([100.0, 102.0, 103.0]))
    norm.running_var.copy_(torch.tensor([1.0, 0.5, 0.1]))
    return norm


class StatisticsOfInput(torch.nn.Module):
    """A BatchNorm that uses the statistics of its input, and tracks them."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        norm = self.norm
        statistics = norm.running_mean, norm.running_var
        y = torch.nn.functional.batch_norm(x, *statistics, norm.weight, norm.bias, training=True)
        return y, norm.running_mean.clone(), norm.running_var


ROWS = [
    row(
        "rms_norm",
        torch.nn.functional.rms_norm,
        cases=[(floats(2, 3, 8), [8], floats(8), 1e-5), (floats(3, 8), [8]), (floats(8), [8], None, 1e-2)],
        loose=2,
        has_kernel=True,
    ),
    row("rms_norm/of small numbers", lambda x: torch.nn.functional.rms_norm(x * 0.01, [8]), floats(3, 8)),
    row("rms_norm/dynamic", torch.nn.RMSNorm(8), floats(2, N, 8), dtypes=F32_ONLY),
    row(
        "layer_norm",
        torch.nn.functional.layer_norm,
        cases=[(floats(2, 3, 8), [8], floats(8), floats(8)), (floats(3, 8), [8]), (floats(3, 8), [8], floats(8))],
        loose=2,
        has_kernel=True,
    ),
    # An element that equals the mean gives 0, not -0, whatever the sign of its weight.
    row(
        "layer_norm/sign of zero",
        lambda x, w: 1 / torch.nn.functional.layer_norm(x, [3], w),
        data([[-1.0, 0.0, 1.0], [2.0, 4.0, 6.0]]),
        data([1.0, -1.0, 1.0]),
    ),
    row("layer_norm/parameters", torch.nn.LayerNorm(8), floats(2, N, 8), dtypes=F32_ONLY, loose=2),
    row(
        "_native_batch_norm_legit_no_training",
        torch.nn.BatchNorm2d(3).eval(),
        floats(2, 3, 4, 4),
        dtypes=F32_ONLY,
        loose=2,
    ),
    row(
        "_native_batch_norm_legit_no_training/large mean",
        large_mean(),
        floats(2, 3, 4, low=101, high=103),
        loose=10,
        dtypes=(f32, torch.float16, torch.bfloat16),
    ),
    row(
        "_native_batch_norm_legit_functional",
        StatisticsOfInput(),
        floats(4, 3, 5),
        dtypes=F32_ONLY,
        loose=10,
        calls=3,
        edge_verified=False,
    ),
    row("native_group_norm", torch.nn.GroupNorm(2, 4), floats(2, 4, 3, 3), dtypes=F32_ONLY, loose=2),
    row("native_group_norm/empty", torch.nn.GroupNorm(2, 4), floats(0, 4, 3), dtypes=F32_ONLY),
    row(
        "linalg_vector_norm/of large numbers",
        lambda x: torch.linalg.vector_norm(1000 * x, 2, -1),
        floats(2, 3),
        dtypes=(torch.float16,),
        traced=True,
    ),
    row(
        "linalg_vector_norm",
        torch.linalg.vector_norm,
        cases=[
            (floats(2, 3), 2, [-1], True),
            (floats(2, 3), 1),
            (floats(2, 3), float("inf"), [0]),
            (floats(2, 3), 3, [1]),
        ],
        dtypes=F32_ONLY,
        loose=2,
        traced=True,
    ),
    row(
        "_cdist_forward",
        torch.cdist,
        cases=[
            (floats(3, 4), floats(5, 4)),
            (floats(2, 3, 4), floats(2, 5, 4), 1.0),
            (data([[1.0, float("nan"), 2.0], [3.0, 4.0, 5.0]]), data([[3.0, 4.5, 5.0]]), 0.0),
        ],
        dtypes=F32_ONLY,
        loose=10,
    ),
]

test_op_row = pytest_function(ROWS)
