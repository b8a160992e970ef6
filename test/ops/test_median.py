"""Medians with NaN and with indices."""

from oprows import FLOATS, Dyn, data, edges, f32, floats, i32, pytest_function, row, spread

NAN = float("nan")
N = Dyn("n", 3, also=(1, 5))

ROWS = [
    row("median", cases=[(floats(5),), (floats(3, 4),), (floats(),)], once=[(edges(),), (floats(4, dtype=i32),)],
        dtypes=FLOATS, verified=False),
    row("median.dim", cases=[(spread(3, 4), 0), (spread(3, 5), -1, True), (spread(2, 3, 4), 1), (floats(), 0)],
        once=[(data([[1.0, NAN, 0.0], [3.0, 1.0, 2.0]]), 1)], dtypes=FLOATS, verified=False),
    row("median.dim/dynamic", lambda x: x.median(1), floats(N, 4), dtypes=(f32,), verified=False),
]

test_op_row = pytest_function(ROWS)
