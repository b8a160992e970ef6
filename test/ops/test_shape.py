"""Views, permutations, slices, concatenation, splits, repeats and padding."""

import torch
from oprows import FLOATS, Dyn, bools, f32, floats, i32, ints, pytest_function, row

N = Dyn("n", 4)
M = Dyn("m", 3, also=(5, 2))
F32_ONLY = (f32,)
aten = torch.ops.aten
dim_order = torch.ops.dim_order_ops


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


# Export replaces views by their copying variants, such as view_copy. Tracing a composite keeps the views.
VIEWS = {
    "permute": [(floats(2, 3, 4), [2, 0, -2]), (floats(), [])],
    "transpose.int": [(floats(2, 3, 4), 0, -1), (floats(3), 0, 0)],
    "t": [(floats(2, 3),), (floats(3),), (floats(),)],
    "unsqueeze": [(floats(2, 3), 0), (floats(2, 3), -1), (floats(), 0)],
    "squeeze": [(floats(1, 2, 1),), (floats(2, 3),), (floats(1),)],
    "squeeze.dim": [(floats(1, 2, 1), -1), (floats(2, 3), 1), (floats(), 0)],
    "squeeze.dims": [(floats(1, 2, 1), [0, -1]), (floats(1, 2, 1), [0, 1])],
    "expand": [(floats(2, 1, 3), [4, 2, 5, -1]), (floats(), [2, 3]), (floats(1, 3), [-1, 3])],
    "slice.Tensor": [
        (floats(5, 3), 0, 1, 3),
        (floats(5, 3), 0, -3, -1),
        (floats(3, 5), -1, 0, 100, 2),
        (floats(5), 0, 4, 2),
        (floats(5), 0, None, None, 3),
        (floats(5, 3), 1),
    ],
    "select.int": [(floats(5, 3), 0, -1), (floats(2, 3), 1, 0), (floats(3), 0, 2)],
    "view": [(floats(2, 3, 4), [4, -1]), (floats(6), [3, 2]), (floats(1), []), (floats(0, 3), [3, 0])],
    "split.Tensor": [(floats(5, 2), 2), (floats(2, 4), 2, -1), (floats(3), 3)],
    "split_with_sizes": [(floats(5, 2), [1, 0, 4]), (floats(2, 4), [3, 1], -1), (floats(3), [3])],
    "unbind.int": [(floats(2, 3),), (floats(2, 3), -1)],
}
# The copying variant that export puts in place of a view, if it is not named <view>_copy.
RENAMED_COPIES = {
    "transpose.int": "permute_copy",
    "t": "permute_copy",
    "squeeze": "squeeze_copy.dims",
    "squeeze.dim": "squeeze_copy.dims",
    "split.Tensor": "split_with_sizes_copy",
    "split_with_sizes": "split_with_sizes_copy",
}
COPIES = [
    row(
        f"{RENAMED_COPIES.get(name) or copy}/{name}",
        getattr(getattr(aten, packet), kind or "default"),
        cases=cases,
        dtypes=FLOATS if name == "view" else F32_ONLY,
    )
    for name, cases in VIEWS.items()
    if name != "unbind.int"
    for packet, _, kind in [name.partition(".")]
    for copy in [f"{packet}_copy.{kind}" if kind else f"{packet}_copy"]
]
TRACED = (
    [row(name, cases=cases, dtypes=F32_ONLY, traced=True) for name, cases in VIEWS.items()]
    + [
        row(name, cases=VIEWS[view], dtypes=F32_ONLY, traced=True)
        for name, view in (
            ("split_copy.Tensor", "split.Tensor"),
            ("squeeze_copy", "squeeze"),
            ("squeeze_copy.dim", "squeeze.dim"),
            ("transpose_copy.int", "transpose.int"),
            ("t_copy", "t"),
            ("unbind_copy.int", "unbind.int"),
            ("_unsafe_view", "view"),
        )
    ]
    + [
        row("detach", floats(2, 3), dtypes=F32_ONLY, traced=True),
        row("alias", floats(2, 3), dtypes=F32_ONLY, traced=True),
        row("clone", floats(2, 3), dtypes=F32_ONLY, traced=True),
        row("lift_fresh_copy", floats(2, 3), dtypes=F32_ONLY, traced=True),
        row("detach_copy", floats(2, 3), dtypes=F32_ONLY, traced=True),
        row("copy", floats(2, 3), floats(3, dtype=torch.float16), dtypes=F32_ONLY, traced=True),
        row(
            "stack",
            cases=[([floats(2, 3), floats(2, 3)], 0), ([floats(2, 3), ints(2, 3, dtype=i32)], -1)],
            dtypes=F32_ONLY,
            traced=True,
        ),
    ]
)

MOVES = [
    row(
        "cat",
        cases=[([floats(2, 3), floats(1, 3)], 0), ([floats(2, 3), floats(2, 2)], -1)],
        once=[([floats(2, 3), floats(0), floats(1, 3)],), ([floats(0, 3), floats(2, 3)],), ([floats(2), floats(0)],)],
        dtypes=FLOATS + (i32, torch.bool),
    ),
    row(
        "cat/promotion",
        torch.cat,
        [floats(2, dtype=torch.float16), ints(2, dtype=i32)],
        cases=[([floats(2), ints(3)],), ([bools(2), ints(3)],)],
        edge_verified=False,
    ),
    row("repeat", cases=[(floats(2, 3), [2, 1, 3]), (floats(), [2]), (floats(2), [0])], dtypes=F32_ONLY),
    row(
        "repeat_interleave.self_int",
        cases=[(floats(2, 3), 2, 1), (floats(2, 3), 2), (floats(2, 3), 3, -2)],
        dtypes=F32_ONLY,
    ),
    row(
        "flip",
        cases=[(floats(2, 3), [0]), (floats(2, 3), [-1, 0]), (floats(0, 3), [0]), (floats(), [0])],
        dtypes=F32_ONLY,
    ),
    row(
        "roll", cases=[(floats(2, 3), [1], [0]), (floats(2, 3), [-2, 1], [1, 0]), (floats(2, 3), [4])], dtypes=F32_ONLY
    ),
    row(
        "constant_pad_nd",
        cases=[
            (floats(2, 3), [1, 2]),
            (floats(2, 3), [1, 2, 0, 1], 1.5),
            (floats(2, 3), [-1, 1]),
            (floats(2, 3, 2), [0, 0, -1, -1, 1, 0], -float("inf")),
            (floats(2, 3), [0, 0]),
        ],
        dtypes=FLOATS,
    ),
    row(
        "constant_pad_nd/crops two axes",
        lambda x: torch.sort(torch.nn.functional.pad(x, (-1, -1, -1, -1)), dim=-2, descending=True),
        floats(2, 5, 6),
        dtypes=F32_ONLY,
    ),
    row(
        "constant_pad_nd/int",
        torch.constant_pad_nd,
        ints(2, 3),
        [1, 2, -1, 0],
        7,
        once=[(ints(2, 3), [1, 2], 2**24 + 1), (ints(2, 3, dtype=i32), [0, 1], 2**31 - 1)],
    ),
    row("dim_order_ops::_clone_dim_order", lambda x: x.clone() + 1, floats(2, 3), dtypes=F32_ONLY),
    row(
        "dim_order_ops::_clone_dim_order/channels last",
        lambda x: (channels_last(x) + 1, channels_last(x).flatten(1), channels_last(x)),
        floats(2, 3, 4, 5),
        dtypes=F32_ONLY,
    ),
    row("alias_copy", lambda x: aten.alias_copy(x) + 1, floats(2, 3), dtypes=F32_ONLY),
]

DYNAMIC = [
    row("view_copy/dynamic", lambda x: x.reshape(x.shape[0] * 2, -1).reshape(-1), floats(N, 6), dtypes=F32_ONLY),
    row("view_copy/two dynamic", lambda x: x.reshape(x.shape[0], x.shape[1], 2, 2), floats(N, M, 4), dtypes=F32_ONLY),
    row("expand_copy/dynamic", lambda x, y: x.expand(y.shape[0], -1) + y, floats(1, 3), floats(N, 3), dtypes=F32_ONLY),
    row(
        "slice_copy.Tensor/dynamic",
        lambda x: (x[1:], x[:-1], x[1:-1], x[:, -2:]),
        floats(Dyn("n", 5, also=(4, 9), min=4), 3),
        dtypes=F32_ONLY,
    ),
    row(
        "slice_copy.Tensor/other's size", lambda x, y: x[: y.shape[0]] * y, floats(16, 2), floats(N, 2), dtypes=F32_ONLY
    ),
    row("cat/dynamic", lambda x, y: torch.cat([x, y, x], 0), floats(N, 2), floats(M, 2), dtypes=F32_ONLY),
    row(
        "slice_copy.Tensor/split with another dynamic axis",
        lambda x: x.split([1, 2], -1),
        floats(N, 3),
        dtypes=F32_ONLY,
    ),
    row("permute_copy/dynamic", lambda x: x.permute(2, 0, 1).reshape(-1, x.shape[0]), floats(N, 3, M), dtypes=F32_ONLY),
    row("constant_pad_nd/dynamic", lambda x: torch.nn.functional.pad(x, (1, 2)), floats(3, N), dtypes=F32_ONLY),
    row("repeat/dynamic", lambda x: x.repeat(2, 3), floats(N, 2), dtypes=F32_ONLY),
    row("flip/dynamic", lambda x: x.flip(0), floats(N, 2), dtypes=F32_ONLY),
    row("roll/dynamic", lambda x: x.roll(2, 0), floats(N, 2), dtypes=F32_ONLY),
    row("select_copy.int/dynamic", lambda x: x[-1], floats(N, 2), dtypes=F32_ONLY),
]

ROWS = [*COPIES, *TRACED, *MOVES, *DYNAMIC]

test_op_row = pytest_function(ROWS)
