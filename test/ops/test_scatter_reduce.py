"""scatter_add, scatter_reduce, index_add and index_reduce."""

import torch
from oprows import Dyn, bf16, data, f16, f32, floats, i32, i64, indices, pytest_function, row

F32_ONLY = (f32,)
N = Dyn("n", 3, also=(1, 5))
aten = torch.ops.aten
REDUCTIONS = ("sum", "mean", "prod", "amax", "amin")

INDEX_5_3 = indices(5, 3, below=4)
NANS = data([1.0, float("nan"), 3.0, float("-inf")])


def with_and_without_self(reduce):
    """Return a function that returns the results with include_self=True and with include_self=False."""
    return lambda x, dim, i, y: [x.scatter_reduce(dim, i, y, reduce, include_self=kept) for kept in (True, False)]


SCATTER_REDUCE = [
    row(
        f"scatter_reduce.two/{reduce}",
        with_and_without_self(reduce),
        cases=[(floats(4, 3), 0, INDEX_5_3, floats(5, 3))],
        once=[
            (floats(4, 3), -1, indices(4, 2, below=3), floats(5, 3)),
            (floats(4), 0, indices(0, below=2), floats(0)),
            (NANS, 0, data([1, 3, 2, 2, 0]), data([2.0, float("nan"), 5.0, 1.0, 1.0])),
        ],
        dtypes=dtypes,
    )
    for reduce, dtypes in (
        ("sum", (f32, i64)),
        ("mean", (bf16, i64)),
        ("prod", (f32,)),
        ("amax", (f32, i64)),
        ("amin", (f16,)),
    )
] + [
    row(
        "scatter_reduce.two/0-d",
        lambda x, i, y: [x.scatter_reduce(0, i, y, r) for r in REDUCTIONS],
        floats(),
        data(0),
        floats(),
        dtypes=F32_ONLY,
    ),
    row(
        "scatter_reduce.two/dynamic",
        lambda x, i, y: (x.scatter_reduce(0, i, y, "sum"), x.scatter_reduce(0, i, y, "mean")),
        floats(4, N),
        indices(2, N, below=4),
        floats(2, N),
        dtypes=F32_ONLY,
    ),
    row(
        "scatter_reduce.two/dynamic number of values",
        lambda x, i, y: [x.scatter_reduce(0, i, y, r, include_self=kept) for r in REDUCTIONS for kept in (True, False)],
        floats(4, 3),
        indices(N, 3, below=4),
        floats(N, 3),
        dtypes=F32_ONLY,
    ),
]

SCATTER = [
    row(
        "scatter_add/larger source",
        torch.scatter_add,
        cases=[(floats(3, 5), 0, indices(2, 3, below=3), floats(4, 4)), (floats(), 0, data(0), floats())],
        dtypes=F32_ONLY,
    ),
    row(
        "scatter.reduce",
        lambda x, dim, i, y: (x.scatter(dim, i, y, reduce="add"), x.scatter(dim, i, y, reduce="multiply")),
        cases=[(floats(4, 3), 0, INDEX_5_3, floats(5, 3)), (floats(4), -1, indices(6, below=4), floats(6))],
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "scatter.value_reduce",
        lambda x, dim, i: (x.scatter(dim, i, 2, reduce="add"), x.scatter(dim, i, -3, reduce="multiply")),
        cases=[(floats(4, 3), 0, INDEX_5_3)],
        dtypes=(f32, i64),
        edge_verified=False,
    ),
]

INDEX = [
    row(
        "index_reduce",
        lambda x, dim, i, y: [
            *(x.index_reduce(dim, i, y, r, include_self=kept) for r in REDUCTIONS[1:3] for kept in (True, False)),
            x.index_reduce(dim, i, y, "amax"),
        ],
        cases=[(floats(4, 3), 0, indices(5, below=4), floats(5, 3)), (floats(2, 4), -1, data([1, 1, 3]), floats(2, 3))],
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "index_add",
        cases=[(floats(5, 3), 0, data([1, 1, 4]), floats(3, 3)), (floats(3, 5), -1, data([0, 2]), floats(3, 2))],
        dtypes=(f32, i32),
    ),
    row(
        "index_add/bools",
        lambda x, i, y: (x > 0).index_add(0, i, y > 0, alpha=2),
        floats(5, 3),
        data([1, 1]),
        floats(2, 3),
        dtypes=F32_ONLY,
    ),
    row(
        "index_add/alpha",
        lambda x, i, y: x.index_add(0, i, y, alpha=2),
        floats(5, N),
        data([1, 1]),
        floats(2, N),
        dtypes=F32_ONLY,
    ),
]

ROWS = [*SCATTER_REDUCE, *SCATTER, *INDEX]

test_op_row = pytest_function(ROWS)
