"""torch.cond."""

import torch
from oprows import Dyn, bools, f32, floats, pytest_function, row

F32_ONLY = (f32,)
cond = torch.ops.higher_order.cond


class Cond(torch.nn.Module):
    """The branches use a tensor and a parameter of the enclosing scope."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, flag, x):
        doubled = x * 2
        return torch.cond(flag, lambda x: x + doubled + self.weight, lambda x: x - self.weight * 0.5, (x,))


def nested(a, b, x):
    def inner(x):
        return torch.cond(b, lambda x: x * 2, lambda x: x * 3, (x,))

    return torch.cond(a, inner, lambda x: x - 1, (x,))


def by_shape_and_value(x):
    return torch.cond(x.sum() > 0, lambda x: (x.exp(), x.sum(0)), lambda x: (-x, x.amax(0)), (x,))


def common_subexpression(flag, x):
    """A value that one branch computes must not be reused in the other branch, nor after the cond."""
    y = torch.cond(flag, lambda x: x.exp() * 2, lambda x: x.exp() * 3, (x,))
    return y + x.exp()


def passed_through(flag, x, y):
    return torch.cond(flag, lambda x, y: (x.clone(), y + 0), lambda x, y: (y.clone(), x + 0), (x, y))


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor([1.0, 2.0]))

    def forward(self, flag, x):
        self.total.add_(torch.cond(flag, lambda x: x * 10, lambda x: x * 1, (x,)))
        return self.total * 1


# Several calls, each with new inputs, so that both branches run.
ROWS = [
    row("higher_order.cond", Cond(), bools(), floats(3), dtypes=F32_ONLY, calls=6),
    row("higher_order.cond/nested", nested, bools(), bools(), floats(2, 3), dtypes=F32_ONLY, calls=8),
    row(
        "higher_order.cond/on a value, two results, dynamic",
        by_shape_and_value,
        floats(Dyn("n", 3, also=(1, 5, 2, 4)), 2),
        dtypes=F32_ONLY,
    ),
    row("higher_order.cond/same work", common_subexpression, bools(), floats(3), dtypes=F32_ONLY, calls=6),
    row("higher_order.cond/passed through", passed_through, bools(), floats(3), floats(3), dtypes=F32_ONLY, calls=6),
    row("higher_order.cond/buffer", Counting(), bools(), floats(2), dtypes=F32_ONLY, calls=6),
]

test_op_row = pytest_function(ROWS)
