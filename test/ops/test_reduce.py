"""Reductions over some axes or all of them."""

import torch
from oprows import FLOATS, Dyn, bools, data, edges, f32, floats, i32, ints, pytest_function, row, spread

NAN = float("nan")
INF = float("inf")
GRID = data([[1.0, NAN, 3.0, -2.0], [INF, 1.0, -INF, 0.5], [2.0, 2.0, -1.0, 2.0], [-INF, NAN, INF, NAN]])
NUMBERS = FLOATS + (i32,)
AXES = [(floats(2, 3, 4), [0]), (floats(2, 3, 4), [-1, 0], True)]
EMPTY = floats(Dyn("n", 3, also=(0, 1), min=0), 4, dtype=f32)
ONCE = [(GRID, [1]), (floats(), [0]), (floats(3), [])]

ROWS = (
    [
        row(
            "sum",
            cases=[(floats(2, 3),)],
            once=[(GRID,), (floats(),), (floats(0, 3),), (bools(4),)],
            dtypes=NUMBERS,
            loose=2,
        ),
        row("sum/dtype", lambda x: torch.sum(x, dtype=f32), floats(40), dtypes=FLOATS),
        row(
            "sum/narrow integers",
            lambda x: [f(x, dtype=d) for f in (torch.sum, torch.prod) for d in (torch.int8, torch.uint8, torch.int16)],
            ints(9),
            edge_verified=False,
        ),
        row(
            "sum.dim_IntList",
            cases=AXES,
            once=[*ONCE, (floats(0, 3), [0]), (bools(3, 4), [1])],
            dtypes=NUMBERS,
            loose=2,
        ),
        row("mean", cases=[(floats(2, 3),)], once=[(GRID,), (floats(),), (floats(0, 3),)]),
        row("mean.dim", cases=AXES, once=[*ONCE, (floats(0, 3), [0])]),
        row(
            "mean.dim/of large numbers",
            lambda x: torch.mean(x.abs() * 20_000, -1),
            floats(2, 8),
            dtypes=(torch.float16,),
        ),
        row("std.dim/of large numbers", lambda x: torch.std(x * 1000, -1), floats(2, 8), dtypes=(torch.float16,)),
        row("prod", cases=[(floats(2, 3),)], once=[(floats(0),), (bools(4),)], dtypes=NUMBERS),
        row(
            "prod.dim_int",
            cases=[(floats(2, 3), 0), (floats(2, 3), -1, True)],
            once=[(floats(), 0), (floats(0, 3), 0), (GRID, 1)],
            dtypes=NUMBERS,
        ),
        row("amax", cases=AXES, once=[*ONCE, (GRID, []), (bools(3, 4), [1])], dtypes=NUMBERS),
        row("amin", cases=AXES, once=[*ONCE, (GRID, []), (bools(3, 4), [1])], dtypes=NUMBERS),
        row("max", cases=[(floats(2, 3),)], once=[(GRID,), (floats(),), (bools(4),)], dtypes=NUMBERS),
        row("min", cases=[(floats(2, 3),)], once=[(GRID,), (floats(),), (bools(4),)], dtypes=NUMBERS),
        row(
            "logsumexp",
            cases=[(floats(2, 3, 4), [1]), (floats(2, 3), [0, 1], True)],
            once=[
                (GRID, [1]),
                (data([[-INF, -INF], [1e4, 1e4]]), [1]),
                (floats(0, 3), [0]),
                (floats(3, 77), [-1], True),
                (data([[0.5] * 76 + [NAN], [-INF] * 76 + [3.0], [2.0] * 76 + [INF]]), [1]),
            ],
        ),
        row("any", cases=[(edges(),)], once=[(floats(0),), (data([0.0, NAN]),), (bools(3),)], dtypes=NUMBERS),
        row("all", cases=[(edges(),)], once=[(floats(0),), (data([1.0, NAN]),), (bools(3),)], dtypes=NUMBERS),
        row(
            "any.dim",
            cases=[(floats(2, 3), -1), (floats(2, 3), 0, True)],
            once=[(floats(0, 3), 0), (floats(), 0)],
            dtypes=NUMBERS,
        ),
        row(
            "all.dim",
            cases=[(floats(2, 3), -1), (floats(2, 3), 0, True)],
            once=[(floats(0, 3), 0), (floats(), 0)],
            dtypes=NUMBERS,
        ),
        row(
            "any.dims",
            cases=[
                (ints(2, 3, 4, low=0, high=2), [0, -1]),
                (bools(2, 3), [0], True),
                (bools(2, 3), None),
                (ints(2, 3, low=0, high=2), []),
            ],
        ),
        row(
            "all.dims",
            cases=[
                (ints(2, 3, 4, low=0, high=2), [0, -1]),
                (bools(2, 3), [0], True),
                (bools(2, 3), None),
                (ints(2, 3, low=0, high=2), []),
            ],
        ),
        row(
            "argmax",
            cases=[(floats(2, 3, low=-9, high=9),), (spread(2, 3), -1), (spread(2, 3), 0, True)],
            once=[
                (GRID, 1),
                (GRID,),
                (floats(),),
                (floats(), 0),
                (data([1.0, 3.0, 3.0, 0.0]), 0),
                (spread(2, 3), None, True),
                (floats(), None, True),
            ],
            dtypes=NUMBERS,
        ),
        row(
            "argmin",
            cases=[(spread(2, 3),), (spread(2, 3), -1), (spread(2, 3), 0, True)],
            once=[
                (GRID, 1),
                (GRID,),
                (floats(),),
                (floats(), 0),
                (data([1.0, 0.0, 3.0, 0.0]), 0),
                (spread(2, 3), None, True),
                (floats(), None, True),
            ],
            dtypes=NUMBERS,
        ),
        row(
            "max.dim",
            cases=[(spread(2, 3), -1), (spread(2, 3), 0, True)],
            once=[(GRID, 1), (floats(), 0)],
            dtypes=NUMBERS,
        ),
        row(
            "min.dim",
            cases=[(spread(2, 3), -1), (spread(2, 3), 0, True)],
            once=[(GRID, 1), (floats(), 0)],
            dtypes=NUMBERS,
        ),
        row(
            "argmax/empty", lambda x: (x.argmax(1), x.argmin(-1, keepdim=True), x.max(1)[0]), EMPTY, edge_verified=False
        ),
        row(
            "logsumexp/empty", lambda x: (x.logsumexp(1), x.logsumexp(0), x.log_softmax(1)), EMPTY, edge_verified=False
        ),
        row("min.dim/beside argmin", lambda x: [x.argmin(-1), x.min(-1)[0]], GRID, edge_verified=False),
        row(
            "cumsum",
            cases=[(floats(2, 3), 0), (floats(2, 3), -1)],
            once=[(floats(), 0), (floats(0, 3), 0), (GRID, 1), (bools(4), 0)],
            dtypes=NUMBERS,
            loose=2,
        ),
    ]
    + [
        row(
            f"{name}.correction",
            lambda x, op=op: (
                op(x, [0, 2], correction=1),
                op(x, -1, keepdim=True, correction=0),
                op(x, correction=2),
                op(x[0, 0, 0], -1, correction=0),
            ),
            floats(2, 3, 4),
        )
        for name, op in (("var", torch.var), ("std", torch.std))
    ]
    + [
        row(f"{name}{overload}", floats(2, 3, 4), *arguments)
        for name in ("var", "std")
        for overload, arguments in ((".dim", ([1, -1], False, True)), (".default", (True,)))
    ]
    + [
        row(
            f"{name}.correction",
            lambda x, op=op: (op(x, [0, 2], keepdim=True), op(x, -1, correction=0), op(x[0, 0, 0], 0, correction=0)),
            floats(2, 3, 4),
            edge_verified=False,
        )
        for name, op in (("var_mean", torch.var_mean), ("std_mean", torch.std_mean))
    ]
)

test_op_row = pytest_function(ROWS)
