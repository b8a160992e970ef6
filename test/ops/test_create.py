"""Operators that create tensors."""

import torch
from oprows import FLOATS, Dyn, f16, f32, floats, i32, i64, ints, pytest_function, row

N = Dyn("n", 3, also=(1, 7))
F32_ONLY = (f32,)
INF = float("inf")
aten = torch.ops.aten


def beside(*creators):
    """Return a function of x. It returns the tensors of `creators`, and x + 1, because a program needs an input."""
    return lambda x: (*[create(x) for create in creators], x + 1)


ROWS = [
    row(
        "full",
        beside(
            lambda x: torch.full([2, 3], 1.5),
            lambda x: torch.full([2], 7),
            lambda x: torch.full([], True),
            lambda x: torch.full([2], -INF, dtype=f16),
            lambda x: torch.full([0, 2], 1, dtype=i32),
            lambda x: torch.full([x.shape[0], 2], 0.1),
            lambda x: torch.full([2], 2**53 + 1),
        ),
        floats(N),
        dtypes=F32_ONLY,
    ),
    row(
        "zeros",
        beside(lambda x: aten.zeros([2, 3]), lambda x: aten.zeros([4], dtype=i64)),
        floats(2),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row(
        "ones",
        beside(lambda x: aten.ones([2, 3]), lambda x: aten.ones([2], dtype=torch.bool)),
        floats(2),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row(
        "scalar_tensor",
        beside(lambda x: aten.scalar_tensor(2.5), lambda x: aten.scalar_tensor(3, dtype=i64)),
        floats(2),
        dtypes=F32_ONLY,
    ),
    row("prims::scalar_tensor", lambda x: (torch.xlogy(x, 1.5), torch.xlogy(2, x)), floats(2, 3, low=1, high=2)),
    row("full_like/large", lambda x: torch.full_like(x, 2**53 + 1), ints(N, 2)),
    row(
        "full_like",
        lambda x: (torch.full_like(x, 2), torch.full_like(x, 3, dtype=i32), torch.full_like(x, True)),
        cases=[(floats(N, 2),), (floats(),)],
        dtypes=FLOATS + (i32,),
    ),
    row("zeros_like", torch.zeros_like, floats(N, 2), dtypes=F32_ONLY, traced=True),
    row("ones_like", lambda x: torch.ones_like(x, dtype=i64), floats(N, 2), dtypes=F32_ONLY, traced=True),
    # The elements that `empty` returns are undefined. These op rows test that the operators give the right shape.
    row(
        "empty.memory_format",
        lambda x: torch.where(x > x, torch.empty([2, 3]), x),
        floats(3),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row("empty_like", lambda x: torch.where(x > x, torch.empty_like(x), x), floats(3), dtypes=F32_ONLY, traced=True),
    row(
        "dim_order_ops::_empty_dim_order",
        lambda x: torch.where(x > x, torch.empty([2, 3]), x),
        floats(3),
        dtypes=F32_ONLY,
    ),
    row("fill.Scalar", lambda x: aten.fill.Scalar(x, 4), floats(2, 3), dtypes=FLOATS, traced=True),
    row(
        "arange",
        beside(lambda x: aten.arange(5), lambda x: aten.arange(2.5), lambda x: aten.arange(3, dtype=f32)),
        floats(2),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row(
        "arange.start",
        beside(lambda x: aten.arange.start(2, 5), lambda x: aten.arange.start(-1.5, 2)),
        floats(2),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row(
        "arange.start_step",
        beside(
            lambda x: torch.arange(5),
            lambda x: torch.arange(2, 9, 3),
            lambda x: torch.arange(5, 0, -2),
            lambda x: torch.arange(0, 1, 0.25),
            lambda x: torch.arange(3, dtype=f16),
            lambda x: torch.arange(x.shape[0]),
            lambda x: torch.arange(1, x.shape[0] + 3, 2),
            lambda x: torch.arange(x.shape[0], dtype=f32),
            lambda x: torch.arange(0, 4, dtype=i32),
        ),
        floats(N),
        dtypes=F32_ONLY,
    ),
    row(
        "arange.start_step/large numbers and fractions",
        beside(
            lambda x: torch.arange(600, dtype=torch.bfloat16),
            lambda x: torch.arange(x.shape[0] * 600, dtype=f16),
            lambda x: torch.arange(2**24 - 1, 2**24 + 5, dtype=f32),
            lambda x: torch.arange(2**60 + 1, 2**60 + 4),
            lambda x: torch.arange(-1.5, 2, dtype=i64),
            lambda x: torch.arange(0, 6, 1.5, dtype=i64),
        ),
        floats(N),
        dtypes=F32_ONLY,
    ),
    row("tril", cases=[(floats(3, 4),), (floats(2, 4, 3), 1), (floats(3, 4), -1)], dtypes=FLOATS + (i32, torch.bool)),
    row("triu", cases=[(floats(3, 4),), (floats(2, 4, 3), 1), (floats(3, 4), -1)], dtypes=FLOATS + (i32, torch.bool)),
    row(
        "tril_indices",
        beside(lambda x: torch.tril_indices(3, 4), lambda x: torch.tril_indices(4, 3, -1, dtype=i32)),
        floats(2),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row(
        "triu_indices",
        beside(lambda x: torch.triu_indices(3, 4), lambda x: torch.triu_indices(4, 3, 1)),
        floats(2),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row(
        "fft_fftfreq",
        beside(lambda x: torch.fft.fftfreq(5), lambda x: torch.fft.fftfreq(4, 0.5)),
        floats(2),
        dtypes=F32_ONLY,
        traced=True,
    ),
    row("fft_rfftfreq", beside(lambda x: torch.fft.rfftfreq(5, 2.0)), floats(2), dtypes=F32_ONLY, traced=True),
    row(
        "tril/dynamic",
        lambda x: torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril(),
        floats(N),
        dtypes=F32_ONLY,
    ),
]

test_op_row = pytest_function(ROWS)
