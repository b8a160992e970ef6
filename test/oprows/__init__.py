"""Op rows: each tests an operator in one line.

    row("exp", floats(2, 3))
    row("sum.dim_IntList", floats(2, 3, 4), [-1, 0], True)
    row("mul.Tensor/broadcast", lambda x, y: x * y, floats(2, 3), floats(3), dtypes=[f32])

The first op row exports calls of `aten.exp` in each floating-point dtype, lowers the exported program to MLX, runs it
and compares the results with eager torch. Under pytest, op rows run in the test process (`pytest_function`).
`run_all_tests.py` runs them in the C++ program `op_test_runner`.
"""

from .check import Failure, compare, pytest_function, run_in_process  # noqa: F401
from .inputs import (  # noqa: F401
    FLOATS,
    INTS,
    Dyn,
    Input,
    bf16,
    bools,
    data,
    edge_column,
    edge_row,
    edges,
    f16,
    f32,
    floats,
    i32,
    i64,
    indices,
    ints,
    spread,
)
from .lowering import Lowered, lower  # noqa: F401
from .row import OpRow, row  # noqa: F401
