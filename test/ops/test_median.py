"""Medians and modes, with NaN and with indices."""

from oprows import FLOATS, Dyn, data, edges, f32, floats, i32, ints, pytest_function, row, spread

NAN = float("nan")
N = Dyn("n", 3, also=(1, 5))

ROWS = [
    row(
        "median",
        cases=[(floats(5),), (floats(3, 4),), (floats(),)],
        once=[(edges(),), (floats(4, dtype=i32),)],
        dtypes=FLOATS,
        edge_verified=False,
    ),
    row(
        "median.dim",
        cases=[(spread(3, 4), 0), (spread(3, 5), -1, True), (spread(2, 3, 4), 1), (floats(), 0)],
        once=[(data([[1.0, NAN, 0.0], [3.0, 1.0, 2.0]]), 1)],
        dtypes=FLOATS,
        edge_verified=False,
    ),
    row(
        "median.dim/several NaN",
        lambda x: [tuple(x.median(d, k)) for d, k in ((0, False), (1, True))],
        data([[NAN, 1.0, NAN, 2.0, 0.0], [3.0, NAN, 3.0, NAN, 0.0], [NAN] * 5, [1.0, 1.0, 2.0, 3.0, NAN]]),
        dtypes=FLOATS,
        edge_verified=False,
    ),
    row("median.dim/dynamic", lambda x: x.median(1), floats(N, 4), dtypes=(f32,), edge_verified=False),
    row(
        "nanmedian",
        cases=[(floats(3, 4),), (edges(),), (ints(5),), (data([NAN, NAN]),), (floats(2, 0),)],
        edge_verified=False,
    ),
    row(
        "nanmedian/dynamic", lambda x: x.nanmedian(), floats(Dyn("n", 3, also=(0, 1, 4), min=0), 2), edge_verified=False
    ),
    row(
        "nanmedian.dim",
        lambda x: [tuple(x.nanmedian(1)), tuple(x.nanmedian(-2, keepdim=True))],
        cases=[(floats(3, 4),), (data([[NAN, 1.0, 2.0], [NAN, NAN, NAN]]),), (floats(2, Dyn("n", 3)),)],
        edge_verified=False,
    ),
    # If a value occurs several times, torch does not define which of its indices `mode` returns.
    row(
        "mode",
        lambda x: [x.mode(1).values, x.mode(0, keepdim=True).values],
        cases=[(ints(5, 9, low=0, high=4),), (data([[2.0, 1.0, 2.0, 1.0, 0.0]]),)],
        edge_verified=False,
    ),
    row(
        "mode/index",
        lambda x: x.gather(1, x.mode(1, keepdim=True).indices),
        ints(4, 9, low=0, high=3),
        edge_verified=False,
    ),
]

test_op_row = pytest_function(ROWS)
