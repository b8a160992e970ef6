"""Reads and writes by index; updates of buffers."""

import torch
from oprows import FLOATS, Dyn, data, f32, floats, i32, indices, ints, pytest_function, row

N = Dyn("n", 3, also=(1, 5))
F32_ONLY = (f32,)

READ = [
    row("embedding", cases=[(floats(7, 4), indices(2, 3, below=7)), (floats(7, 4), indices(below=7))]),
    row(
        "embedding/int32",
        torch.nn.functional.embedding,
        ints(5, dtype=i32, low=0, high=7),
        floats(7, 4),
        dtypes=F32_ONLY,
    ),
    row("embedding/dynamic", torch.embedding, floats(7, 4), indices(N, 2, below=7), dtypes=F32_ONLY),
    row(
        "index_select",
        cases=[
            (floats(5, 3), 0, indices(4, below=5)),
            (floats(5, 3), -1, indices(2, below=3)),
            (floats(3), 0, indices(below=3)),
        ],
        dtypes=FLOATS + (i32, torch.bool),
    ),
    row(
        "gather",
        cases=[
            (floats(5, 3), 0, indices(2, 3, below=5)),
            (floats(5, 3), -1, indices(2, 2, below=3)),
            (floats(5), 0, indices(0, below=5)),
        ],
        dtypes=FLOATS + (i32,),
    ),
    row("gather/dynamic", lambda x, i: x.gather(1, i), floats(N, 6), indices(N, 2, below=6), dtypes=F32_ONLY),
    row(
        "gather/leading rows",
        lambda x, i: x.gather(1, i),
        floats(Dyn("rows", 5, also=(6,)), 6),
        indices(Dyn("m", 5, also=(3,)), 2, below=6),
        dtypes=F32_ONLY,
    ),
    row(
        "index.Tensor",
        lambda x, i: x[i],
        cases=[(floats(5, 3), indices(4, below=5)), (floats(5, 3), indices(2, 2, below=5, low=-5))],
        dtypes=FLOATS + (i32,),
    ),
    row(
        "index.Tensor/axes",
        lambda x, i, j: (x[i, j], x[:, i], x[:, i, j], x[i[:, None], j]),
        floats(5, 4, 6),
        indices(3, below=4, low=-4),
        indices(3, below=4, low=-4),
        dtypes=F32_ONLY,
    ),
    row(
        "index.Tensor/empty",
        lambda x: (x[:, 0], x[:, [-1, 1]], x[:, [[0, 3]]]),
        floats(Dyn("n", 3, also=(0, 1), min=0), 4),
        dtypes=F32_ONLY,
    ),
    row(
        "index.Tensor/axes, empty",
        lambda x, i: (x[:, i, i], x[:, i[:, None], i]),
        floats(Dyn("b", 3, also=(0, 1), min=0), 4, 5),
        indices(2, below=4),
        dtypes=F32_ONLY,
    ),
    row(
        "index.Tensor/axes, dynamic",
        lambda x, i: (x[:, i, i] + 1, x[i, i]),
        floats(Dyn("b", 4, also=(5,)), Dyn("h", 5, also=(4,)), 4),
        indices(2, below=4),
        dtypes=F32_ONLY,
    ),
    row("index.Tensor/dynamic", lambda x, i: (x[:, i], x[i, i]), floats(5, 4, 2), indices(N, below=4), dtypes=F32_ONLY),
]

WRITE = [
    row(
        "index_copy",
        cases=[
            (floats(5, 3), 0, data([3, 0]), floats(2, 3)),
            (floats(3, 5), -1, data([1, 2, 3]), floats(3, 3)),
            (floats(5), 0, data([4]), floats(1)),
        ],
        dtypes=FLOATS + (i32,),
    ),
    row(
        "index_put",
        cases=[
            (floats(5, 3), [data([3, 0])], floats(2, 3)),
            (floats(5, 3), [data([3, 0])], floats()),
            (floats(5, 3), [data([-1, 0])], floats(3)),
            (floats(5, 3), [None, data([2])], floats(5, 1)),
        ],
        dtypes=FLOATS,
    ),
    row(
        "slice_scatter",
        cases=[
            (floats(5, 3), floats(2, 3), 0, 1, 3),
            (floats(5, 3), floats(5, 1), -1, -1),
            (floats(5), floats(3), 0, 0, 5, 2),
            (floats(5), floats(5)),
            (floats(5), floats(2), 0, -3, -1),
        ],
        dtypes=FLOATS + (i32,),
    ),
    row(
        "slice_scatter/dynamic",
        lambda x, y: x.slice_scatter(y, 0, 0, y.shape[0]),
        floats(8, 2),
        floats(N, 2),
        dtypes=F32_ONLY,
    ),
    row("select_scatter", cases=[(floats(5, 3), floats(3), 0, -1), (floats(5, 3), floats(5), 1, 0)]),
    row(
        "scatter_add",
        cases=[
            (floats(5, 3), 0, indices(2, 3, below=5), floats(2, 3)),
            (floats(5), 0, data([1, 1, 1]), floats(3)),
            (floats(3, 5), -1, indices(3, 2, below=5), floats(3, 2)),
        ],
        dtypes=(f32, i32),
    ),
]


class Stateful(torch.nn.Module):
    """A module with the given buffers that calls `step(module, *inputs)`."""

    def __init__(self, step, **buffers):
        super().__init__()
        self.step = step
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs):
        return self.step(self, *inputs)


def stateful(name, step, *inputs, **buffers):
    return row(name, Stateful(step, **buffers), *inputs, dtypes=F32_ONLY, calls=4)


def counter(m):
    m.count.add_(1)
    return m.count.clone()


def counter_itself(m, x):
    m.count.add_(x)
    return m.count


def integer_number(m, x):
    m.count.add_(2)
    count = m.count
    return 5 - x, x * 3 + count, count // 2, x % 2, (x + 1).clamp(max=2), count, x + 1000, x + x


def returned_under_two_names(m, x):
    old = m.state.clone()
    y = torch.cat([x, m.state[:1]])
    m.state.copy_(y)
    m.other.mul_(2)
    return y, m.state, m.state.view(2, 2), m.other[:], old, m.state


def swapped_and_returned(m, x):
    a = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(a + x)
    return m.a, m.b


def copies_of_other_dtypes(m, x):
    m.halves.copy_(x * 3)
    m.integers[:] = x * 3
    m.flags.copy_(x[0] > 0)
    m.rows.copy_(x[0])
    return m.halves, m.integers + 0, m.flags.clone(), m.rows.float() * 2


def read_after_write(m, x):
    m.state.mul_(0.5).add_(x)
    return m.state * 2


def read_before_write(m, x):
    old = m.state * 2
    m.state.copy_(x)
    return old


def old_and_new(m, x):
    old = m.state + 0
    m.state.add_(x)
    return old, m.state - old, m.state.clone()


def index_copy_and_old_value(m, x, at):
    before = m.cache.clone()
    m.cache.index_copy_(0, at, x)
    return before, m.cache.sum(0)


def assign(m, x):
    m.cache[1:3] = x
    return m.cache * 1


def assign_at(m, x, at):
    start = at.item()
    torch._check(start >= 0)
    torch._check(start + 2 <= 6)
    m.cache.narrow(0, start, 2).copy_(x)
    return m.cache.sum(0)


def two_buffers(m, x):
    m.a.add_(x)
    m.b.mul_(m.a)
    return m.a - m.b


def swap(m, x):
    a = m.a.clone()
    m.a.copy_(m.b * 2)
    m.b.copy_(a + x)
    return m.a + 0, m.b + 0


def exchange(m, x):
    a, b = m.a.clone(), m.b.clone()
    m.a.copy_(b)
    m.b.copy_(a)
    return x + a - 2 * b


def previous(m, x):
    out = m.previous * 1
    m.previous.copy_(m.current)
    m.current.index_copy_(0, torch.tensor([0]), x[:1])
    return out


def written_twice(m, x, at):
    m.cache.index_copy_(0, at, x)
    middle = m.cache.sum()
    m.cache.index_copy_(0, at + 1, x * 2)
    return middle, m.cache.clone()


def inputs_taken_over(m, x):
    out = m.state + 1, m.rows + 1
    m.state.copy_(x[:])  # a view that changes nothing
    m.rows.copy_(x)
    return out


def unread(m, x):
    m.state.add_(x)
    return x * 2


def kv(m, x, at):
    m.cache.copy_(torch.ops.mlx.cache_update(m.cache, x, at))
    return m.cache[:, :, :4] * 1


STATE = [
    stateful("add.Tensor/counter", counter, count=torch.tensor([5])),
    stateful("add.Tensor/counter itself", counter_itself, ints(1), count=torch.tensor([7])),
    stateful(
        "add.Tensor/0-d integers and numbers",
        integer_number,
        ints(dtype=i32, low=0, high=9),
        count=torch.tensor(5, dtype=i32),
    ),
    stateful(
        "mul.Tensor/buffers that are returned",
        returned_under_two_names,
        floats(3),
        state=torch.arange(4.0),
        other=torch.ones(2),
    ),
    stateful(
        "add.Tensor/buffers swapped and returned", swapped_and_returned, floats(3), a=torch.zeros(3), b=torch.ones(3)
    ),
    stateful(
        "mul.Tensor/copies of other dtypes",
        copies_of_other_dtypes,
        floats(2, 3),
        halves=torch.ones(2, 3, dtype=torch.float16),
        integers=torch.ones(2, 3, dtype=i32),
        flags=torch.zeros(3, dtype=torch.int8),
        rows=torch.zeros(2, 3, dtype=torch.bfloat16),
    ),
    stateful("mul.Tensor/buffer read after write", read_after_write, floats(3), state=torch.ones(3)),
    stateful("mul.Tensor/buffer read before write", read_before_write, floats(3), state=torch.zeros(3)),
    stateful("add.Tensor/old and new", old_and_new, floats(3), state=torch.tensor([1.0, 2.0, 3.0])),
    stateful(
        "index_copy/buffer",
        lambda m, x, at: m.cache.index_copy_(0, at, x) * 1,
        floats(2, 3),
        data([1, 4]),
        cache=torch.zeros(6, 3),
    ),
    stateful(
        "index_copy/buffer and its old value",
        index_copy_and_old_value,
        floats(1, 3),
        indices(1, below=6),
        cache=torch.arange(18.0).reshape(6, 3),
    ),
    stateful("index_copy/buffer twice", written_twice, floats(1, 3), indices(1, below=5), cache=torch.zeros(6, 3)),
    stateful("slice_scatter/buffer", assign, floats(2, 3), cache=torch.ones(6, 3)),
    stateful("slice_scatter/buffer at a number", assign_at, floats(2, 3), indices(below=5), cache=torch.ones(6, 3)),
    stateful("add.Tensor/two buffers", two_buffers, floats(3), a=torch.ones(3), b=torch.full((3,), 2.0)),
    stateful("add.Tensor/buffers swapped", swap, floats(3), a=torch.ones(3), b=torch.full((3,), 2.0)),
    stateful("add.Tensor/buffers exchanged", exchange, floats(3), a=torch.ones(3), b=torch.zeros(3)),
    stateful(
        "index_copy/buffer and its previous value", previous, floats(3), current=torch.ones(3), previous=torch.zeros(3)
    ),
    stateful(
        "add.Tensor/buffers that take an input",
        inputs_taken_over,
        floats(3),
        state=torch.ones(3),
        rows=torch.ones(2, 3),
    ),
    stateful("add.Tensor/buffer nobody reads", unread, floats(3), state=torch.zeros(3)),
    stateful(
        "index_put/buffer",
        lambda m, x, at: (m.cache.index_put_([at], x), m.cache * 1)[1],
        floats(2, 3),
        data([5, 2]),
        cache=torch.zeros(6, 3),
    ),
    stateful("mlx::cache_update", kv, floats(1, 2, 2, 4), indices(below=4), cache=torch.zeros(1, 2, 8, 4)),
]

ROWS = [*READ, *WRITE, *STATE]

test_op_row = pytest_function(ROWS)
