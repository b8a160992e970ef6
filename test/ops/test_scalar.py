"""Sizes, integers on the host, and assertions."""

import torch
from oprows import Dyn, f32, floats, ints, pytest_function, row
from torch.nn import functional as F

N, M = Dyn("n", 4, also=(1, 7, 5)), Dyn("m", 3, also=(5, 2, 1))
SIZE = Dyn("size", 4, also=(2, 5), max=7)
F32_ONLY = (f32,)
aten = torch.ops.aten


def full_of_size(size):
    """Return a function whose result has the extent `size(n, m)`, an integer that the host computes."""
    return lambda x, y: torch.full([size(x.shape[0], y.shape[0])], 1.0) + x.sum()


def arithmetic(name, size, **options):
    return row(name, full_of_size(size), floats(N), floats(M), dtypes=F32_ONLY, loose=10, **options)


def item_slice(x, at):
    start = at.item()
    torch._check(start >= 0)
    torch._check(start <= 3)
    return x.narrow(0, start, 2)


def asserted(x, at):
    torch.ops.aten._assert_async.msg(at >= 0, "negative")
    return x + at


def conditions(x, at):
    """Use conditions on sizes and on a number from a tensor, of which one is also asserted."""
    n, size = at.item(), x.shape[0]
    torch._check(n >= 0)
    branch = torch.cond((size > 4) & (n != 2), lambda x: x + 1, lambda x: x - 1, (x,))
    either = torch.cond(torch.sym_not((size <= 4) | (n < 2)), lambda x: x * 2, lambda x: x * 3, (x,))
    return branch, either, x * (size >= 5), x + (n == 2)


def symbolic_arguments(x, y):
    """Pass the extent of `y` to operators whose lowering is traced."""
    n = y.shape[0]
    image = x[None, None].expand(1, 1, 3, 8)
    counts = torch.arange(5)
    return (
        F.interpolate(image, size=(n, 4), mode="bilinear"),
        F.pad(x[None], (n - 2, 1), mode="reflect"),
        x.kthvalue(n),
        counts << n,
        counts % n,
        x // n,
        torch.ops.aten.scatter.value(x, 0, counts, n),
    )


ROWS = [
    arithmetic("operator.add", lambda n, m: n + m),
    arithmetic("operator.sub", lambda n, m: n - 1 + 2 * m),
    arithmetic("operator.mul", lambda n, m: n * m + 3 * n),
    arithmetic("operator.floordiv", lambda n, m: (n * m) // 3 + 1),
    arithmetic("operator.mod", lambda n, m: n % 3 + m),
    arithmetic("operator.pow", lambda n, m: n**2 + m**3 + n**5),
    arithmetic("torch.sym_max", lambda n, m: torch.sym_max(n, m) + torch.sym_max(3, n), edge_verified=False),
    arithmetic("torch.sym_min", lambda n, m: torch.sym_min(n, m) * 10 + torch.sym_min(m, 4), edge_verified=False),
    row("operator.neg", lambda x: x[:, -x.shape[0] :] + 1, floats(N, 20), dtypes=F32_ONLY),
    row(
        "sym_size.int",
        lambda x, y: (x.reshape(x.shape[0] * 2, 3) + 1, y.expand(x.shape[0], y.shape[0])),
        floats(N, 6),
        floats(M),
        dtypes=F32_ONLY,
    ),
    row("operator.mul/number of elements", lambda x: x.reshape(x.numel()) + 1, floats(N, 3, M), dtypes=F32_ONLY),
    row("_local_scalar_dense", item_slice, floats(6, 2), ints(low=0, high=4), dtypes=F32_ONLY, calls=4),
    row("operator.gt", conditions, floats(N), ints(low=0, high=4), dtypes=F32_ONLY, calls=4, edge_verified=False),
    row(
        "upsample_bilinear2d.vec/symbolic size",
        symbolic_arguments,
        floats(8),
        floats(SIZE),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row("_assert_async.msg", asserted, floats(3), ints(low=0, high=4), dtypes=F32_ONLY),
]

test_op_row = pytest_function(ROWS)
