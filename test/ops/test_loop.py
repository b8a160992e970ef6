"""scan, map and while_loop."""

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from oprows import FLOATS, data, f32, floats, ints, pytest_function, row
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

F32_ONLY = (f32,)
WHILE = {"nodes": ["WhileNode"]}


def decayed_sum(init, xs):
    return scan(lambda c, x: (c * 0.5 + x, (c + x).tanh()), init, xs)


def fibonacci(a, b, xs):
    """Each step moves the second tensor of the carry to the first place."""
    return scan(lambda c, x: ((c[1] + 0, c[0] + c[1]), c[0] * x), (a, b), xs)


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.Linear(6, 4)

    def forward(self, state, xs):
        def step(state, x):
            state = self.cell(torch.cat([state, x], -1)).tanh()
            return state, state * 2

        return scan(step, state, xs)


class Halve(torch.nn.Module):
    def forward(self, x):
        return while_loop(lambda x: x.sum() > 1, lambda x: (x * 0.5,), (x,))


class Newton(torch.nn.Module):
    """Square roots of `a` by Newton's method, and the number of steps. The body reads a parameter and `a`."""

    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, a):
        def continues(steps, x):
            return torch.logical_and((x * x - a).abs().max() > 1e-4, steps < 50)

        def step(steps, x):
            return steps + 1, self.factor * (x + a / x)

        return while_loop(continues, step, (torch.tensor(0), torch.ones_like(a)))


def swapped(a, b):
    """Each step moves the second tensor of the carry to the first place. Operators after the loop read its results."""
    a, b, n = while_loop(lambda a, b, n: n < 5, lambda a, b, n: (b + 0, a + b, n + 1), (a, b, torch.tensor(0)))
    return a * 2, b - a, n


def counted(total, small):
    """The dtypes of a 0-d tensor and of a number do not promote each other."""
    n, total, small = while_loop(
        lambda n, total, small: n < 5,
        lambda n, total, small: (n + 1, total * 0.5 + 0.25, small * 3 - 1),
        (torch.tensor(0, dtype=torch.int32), total, small),
    )
    return n, total, small, *scan(lambda c, x: (c * 1.5 + x, c - 0.5), total, total.expand(3))


ROWS = [
    row("higher_order.scan", decayed_sum, floats(3), floats(5, 3), dtypes=F32_ONLY),
    row("higher_order.scan/exchange", fibonacci, floats(2), floats(2), floats(4, 2), dtypes=F32_ONLY),
    row("higher_order.scan/parameters", Recurrent(), floats(2, 4), floats(5, 2, 2), dtypes=F32_ONLY),
    row(
        "higher_order.map_impl",
        lambda xs, w: torch_map(lambda x, w: ((x @ w).relu(), x > 0), xs, w),
        floats(5, 2, 3),
        floats(3, 4),
        dtypes=F32_ONLY,
    ),
    row("higher_order.while_loop", Newton(), cases=[(floats(3, low=1, high=50),)], dtypes=F32_ONLY, loose=4, **WHILE),
    row(
        "higher_order.while_loop/none or some",
        Halve(),
        cases=[(data([0.5, 0.25]),), (data([100.0, 3.0]),)],
        dtypes=F32_ONLY,
        **WHILE,
    ),
    row("higher_order.while_loop/0-d and a number", counted, floats(), ints(dtype=torch.int8), dtypes=FLOATS, **WHILE),
    row("higher_order.while_loop/exchange", swapped, floats(2), floats(2), dtypes=F32_ONLY, **WHILE),
]

test_op_row = pytest_function(ROWS)


def test_while_loop_needs_extensions():
    """Without extensions, a program with a while_loop cannot run, because ExecuTorch has no kernel for while_loop."""
    partitioner = MLXPartitioner()
    program = torch.export.export(Halve(), (torch.ones(3),))
    to_edge_transform_and_lower(program, partitioner=[partitioner])
    (reason,) = {d.reason for d in partitioner.explain().refused if "while_loop" in d.target}
    assert "allow_extensions=True" in reason
