"""Operators that are lowered by decomposition, and cumulative operators."""

import torch
import torch.nn.functional as F
from oprows import data, edges, f16, f32, floats, i32, i64, ints, pytest_function, row

aten = torch.ops.aten
I8, U8 = torch.int8, torch.uint8
F32_ONLY, SHIFTED = (f32,), (i64, i32, I8, U8)


def shifts(name, scalar_overload, operator):
    yield row(
        f"{name}.{scalar_overload}",
        lambda x: [operator(x, k) for k in (0, 1, 7)],
        ints(2, 5, low=-100, high=100, dtype=None),
        dtypes=SHIFTED,
    )
    yield row(
        f"{name}.Tensor",
        operator,
        ints(9, low=-1000, high=1000),
        data([0, 1, 5, 31, 62, 63, 64, 70, 2]),
        dtypes=F32_ONLY,
    )
    yield row(
        f"{name}.Tensor/int32",
        operator,
        ints(6, low=-1000, high=1000, dtype=i32),
        data([0, 1, 5, 31, 32, 9], i32),
        dtypes=F32_ONLY,
    )


def shifts_of_numbers(name):
    shift = getattr(torch, name)
    yield row(
        f"{name}.Scalar_Tensor",
        lambda distance: [shift(k, distance) for k in (3, -77, 300)],
        data([0, 1, 5, 8, -1], None),
        dtypes=(i64, i32, I8),
    )
    yield row(f"{name}.Tensor_Scalar/bool", lambda x: shift(x, 3), data([True, False]), dtypes=F32_ONLY)
    yield row(
        f"{name}.Tensor_Scalar/beyond the range of the dtype",
        lambda x: shift(x, 257),
        data([1, 2, -3, 100], I8),
        dtypes=F32_ONLY,
    )


def searchsorted(name, *inputs, **options):
    return row(name, lambda steps, x: torch.searchsorted(steps, x, **options), *inputs, dtypes=F32_ONLY)


BOUNDARIES = data([-1.0, 0.0, 0.0, 0.5, 2.0])

# The operators that torch's own decompositions decompose.
BY_TORCH = [
    row("elu", cases=[(edges(),), (floats(2, 3), 0.5, 2.0)], dtypes=F32_ONLY),
    row("hardtanh", cases=[(edges(),), (floats(2, 3), -2, 0.5)], dtypes=F32_ONLY),
    row("leaky_relu", cases=[(edges(),), (floats(2, 3), 0.2)], dtypes=F32_ONLY, signed_zero=False),
    row("addmv", cases=[(floats(3), floats(3, 4), floats(4))], dtypes=F32_ONLY, loose=10, traced=True),
    row(
        "native_layer_norm",
        lambda x, w, b: torch.native_layer_norm(x, [3, 4], w, b, 1e-5),
        floats(2, 3, 4),
        floats(3, 4),
        floats(3, 4),
        dtypes=F32_ONLY,
        loose=10,
    ),
    row(
        "_native_batch_norm_legit.no_stats", lambda x: F.instance_norm(x), floats(2, 3, 4, 4), dtypes=F32_ONLY, loose=10
    ),
]

# The operators that handlers of this project lower or decompose.
BY_HANDLERS = [
    row("exp2", cases=[(floats(2, 5, low=-20, high=15),), (edges(),), (ints(5),)]),
    row("erfc", cases=[(floats(40, low=-5, high=5),), (edges(),)]),
    row("special_exp2", lambda x: torch.special.exp2(x), floats(5)),
    row("special_erfc", lambda x: torch.special.erfc(x), floats(5)),
    row("logaddexp2", floats(3, 4), floats(4)),
    row("logaddexp2/integers", lambda x, y: torch.logaddexp2(x, y), ints(3, 4), floats(4, dtype=f16), dtypes=F32_ONLY),
    row("erfc/tail", lambda x: torch.erfc(x) * 1e12, floats(20, low=3, high=5, dtype=f32), dtypes=F32_ONLY),
    row("signbit", cases=[(edges(zeros=True),), (ints(7),)], dtypes=F32_ONLY),
    row("copysign.Tensor", cases=[(floats(3, 4), floats(4)), (floats(3, dtype=f32), data([0.0, -0.0, -2.0]))]),
    row("copysign.Tensor/integers", ints(3, 4), floats(4), edge_verified=False),
    row("copysign.Scalar", lambda x: [torch.copysign(x, s) for s in (-0.0, 0.0, -2)], floats(5)),
    row("fmin", cases=[(edges(), floats(20)), (ints(4), ints(4))]),
    row("fmax", cases=[(edges(), floats(20)), (ints(4), ints(4))]),
    row("ldexp.Tensor", floats(3, 4), ints(4, low=-5, high=5)),
    row("ldexp.Tensor/integers", ints(3, 4), floats(4), edge_verified=False),
    *shifts("__lshift__", "Scalar", lambda x, k: x << k),
    *shifts("__rshift__", "Scalar", lambda x, k: x >> k),
    *shifts("bitwise_left_shift", "Tensor_Scalar", torch.bitwise_left_shift),
    *shifts("bitwise_right_shift", "Tensor_Scalar", torch.bitwise_right_shift),
    *shifts_of_numbers("bitwise_left_shift"),
    *shifts_of_numbers("bitwise_right_shift"),
    row("bucketize.Tensor", lambda x, steps: torch.bucketize(x, steps), floats(3, 4), BOUNDARIES, dtypes=F32_ONLY),
    row(
        "bucketize.Tensor/right",
        lambda x, steps: torch.bucketize(x, steps, right=True, out_int32=True),
        edges(),
        BOUNDARIES,
        dtypes=F32_ONLY,
    ),
    searchsorted("searchsorted.Tensor", BOUNDARIES, edges()),
    searchsorted("searchsorted.Tensor/rows", data([[0.0, 1.0, 1.0], [2.0, 3.0, 9.0]]), floats(2, 5), right=True),
    searchsorted("searchsorted.Tensor/side", BOUNDARIES, data([[0.0, 2.0], [3.0, -1.0]]), side="right"),
    row(
        "searchsorted.Tensor/sorter",
        lambda s, x, order: torch.searchsorted(s, x, sorter=order),
        data([3.0, 1.0, 2.0]),
        floats(4),
        data([1, 2, 0]),
        dtypes=F32_ONLY,
    ),
    row("kthvalue", lambda x: [tuple(x.kthvalue(2, 1)), tuple(x.kthvalue(1, -2, keepdim=True))], floats(3, 4)),
    row("bilinear", torch.nn.Bilinear(4, 5, 6), floats(2, 3, 4), floats(2, 3, 5), dtypes=F32_ONLY),
    row(
        "_trilinear",
        lambda x, y, w: aten._trilinear(x, w, y, [1, 3], [0], [1, 2], [2, 3]),
        floats(2, 4),
        floats(2, 5),
        floats(6, 4, 5),
        loose=3,
    ),
    row(
        "addbmm",
        lambda x, a, b: (
            torch.addbmm(x, a, b, beta=0.5, alpha=2),
            torch.addbmm(x / 0, a, b, beta=0),
            torch.addmm(x / 0, a[0], b[0], beta=0),
        ),
        floats(2, 4),
        floats(3, 2, 5),
        floats(3, 5, 4),
        dtypes=F32_ONLY,
        loose=3,
        edge_verified=False,
    ),
    row("angle", cases=[(edges(),), (ints(7),)], edge_verified=False),
    row(
        "diagonal_scatter",
        lambda x, a, b: [x.diagonal_scatter(a), x.diagonal_scatter(b, 1), x.diagonal_scatter(b, -2)],
        floats(4, 3),
        floats(3),
        floats(2),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "diagonal_scatter/dtype",
        lambda x, a: x.to(torch.int8).diagonal_scatter(a),
        floats(4, 3),
        floats(3),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "diagonal_scatter/axes",
        lambda x, a: x.diagonal_scatter(a, -1, 2, 0),
        floats(4, 2, 3),
        floats(2, 2),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "dist",
        lambda x, y: [torch.dist(x, y), torch.dist(x, y, 1)],
        floats(3, 4),
        floats(4),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row("_pdist_forward", lambda x: F.pdist(x), floats(5, 3), dtypes=F32_ONLY, edge_verified=False),
    row(
        "put",
        lambda x, i, y: [torch.put(x, i, y), torch.put(x, i[:1], y[:1], accumulate=True)],
        floats(3, 4),
        data([1, 11]),
        floats(2),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row("rrelu_with_noise_functional", lambda x: F.rrelu(x, 0.1, 0.4), floats(9), edge_verified=False),
    row(
        "cumprod", loose=3, cases=[(floats(3, 7), 1), (floats(5, 2, low=-1, high=1), -2), (ints(6, low=-3, high=3), 0)]
    ),
    row("cumprod/beyond half precision", lambda x: x.cumprod(0), data([300, 300, 0, 300, 300, 2]), dtypes=(f32, f16)),
    row("cumprod/dtype", lambda x: x.cumprod(0, dtype=f32), ints(5)),
    row("logcumsumexp", cases=[(floats(3, 9), 1), (floats(1, 2), 0)], loose=3),
    row("cummax", lambda x: [*x.cummax(0), *x.cummax(-1)], cases=[(floats(3, 7),), (ints(4, 6, low=-2, high=2),)]),
    row("cummax/edges", lambda x: [*x.cummax(0)], edges(), dtypes=(f32, f16)),
    row("cummin", lambda x: [*x.cummin(0), *x.cummin(-1)], cases=[(floats(3, 7),), (ints(4, 6, low=-2, high=2),)]),
]

ROWS = [*BY_TORCH, *BY_HANDLERS]

test_op_row = pytest_function(ROWS)
