"""Scans; loops that stay with ExecuTorch."""

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from oprows import checks, f32, floats, row
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

ONE = (f32,)


def running(init, xs):
    return scan(lambda c, x: (c * 0.5 + x, (c + x).tanh()), init, xs)


def fibonacci(a, b, xs):
    """The two parts of the carry change places."""
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


ROWS = [
    row("higher_order.scan", running, floats(3), floats(5, 3), dtypes=ONE),
    row("higher_order.scan/exchange", fibonacci, floats(2), floats(2), floats(4, 2), dtypes=ONE),
    row("higher_order.scan/parameters", Recurrent(), floats(2, 4), floats(5, 2, 2), dtypes=ONE),
]

test_row = checks(ROWS)


def test_while_loop_is_refused_with_a_reason():
    """ExecuTorch lowers none either, so that there is no program to run."""
    partitioner = MLXPartitioner()
    program = torch.export.export(Halve(), (torch.ones(3),))
    to_edge_transform_and_lower(program, partitioner=[partitioner])
    (reason,) = {d.reason for d in partitioner.explain().refused if "while_loop" in d.target}
    assert "no loop that ends by what it computes" in reason
