"""Gradients that torch does not decompose, such as those of convolutions, poolings, resamplings and attention."""

import torch
from executorch_mlx.custom_ops.primitives import after
from oprows import f32, floats, pytest_function, row

F32_ONLY = (f32,)
aten = torch.ops.aten


CONVOLUTION = [
    row(
        "convolution_backward",
        cases=[
            (floats(2, 6, 4), floats(2, 4, 9), floats(6, 2, 3), [6], [2], [1], [2], False, [0], 2, [True] * 3),
            (floats(2, 6, 4, 3), floats(2, 4, 9, 6), floats(6, 4, 3, 2), [6], [2, 2], [0, 1], [1, 2], False, [0, 0], 1)
            + ([True] * 3,),
            (floats(2, 6, 17, 6), floats(2, 4, 8, 6), floats(4, 3, 3, 1), [6], [2, 1], [0, 0], [1, 1], True, [0, 0], 2)
            + ([True] * 3,),
        ],
        dtypes=F32_ONLY,
        loose=8,
    )
]

POOLING = [
    row(
        "max_pool2d_with_indices_backward",
        lambda g, x: aten.max_pool2d_with_indices_backward(
            g, x, [3, 2], [2, 1], [1, 0], [1, 1], False, aten.max_pool2d_with_indices(x, [3, 2], [2, 1], [1, 0])[1]
        ),
        floats(1, 2, 4, 5),
        floats(1, 2, 7, 6),
        dtypes=F32_ONLY,
    ),
    row(
        "max_pool3d_with_indices_backward",
        lambda g, x: aten.max_pool3d_with_indices_backward(
            g, x, [2, 2, 2], [1, 1, 1], [0, 0, 0], [1, 1, 1], False, aten.max_pool3d_with_indices(x, [2], [1])[1]
        ),
        floats(1, 2, 2, 3, 3),
        floats(1, 2, 3, 4, 4),
        dtypes=F32_ONLY,
    ),
    row(
        "adaptive_max_pool2d_backward",
        lambda g, x: aten.adaptive_max_pool2d_backward(g, x, aten.adaptive_max_pool2d(x, [2, 3])[1]),
        floats(2, 2, 3),
        floats(2, 5, 7),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "adaptive_max_pool3d_backward",
        lambda g, x: aten.adaptive_max_pool3d_backward(g, x, aten.adaptive_max_pool3d(x, [2, 3, 1])[1]),
        floats(2, 2, 3, 1),
        floats(2, 5, 7, 3),
        dtypes=F32_ONLY,
        edge_verified=False,
    ),
    row(
        "avg_pool2d_backward",
        cases=[
            (floats(1, 2, 4, 3), floats(1, 2, 7, 6), [3, 2], [2, 2], [1, 0], False, False, None),
            (floats(1, 2, 4, 3), floats(1, 2, 7, 6), [3, 2], [2, 2], [1, 0], False, True, 5),
        ],
        dtypes=F32_ONLY,
    ),
    row(
        "avg_pool3d_backward",
        cases=[(floats(1, 2, 2, 3, 3), floats(1, 2, 4, 6, 5), [2, 2, 3], [2, 2, 1], [0, 0, 0], False, True, None)],
        dtypes=F32_ONLY,
    ),
    row("_adaptive_avg_pool2d_backward", floats(1, 2, 3, 2), floats(1, 2, 7, 4), dtypes=F32_ONLY),
    row("_adaptive_avg_pool3d_backward", floats(1, 2, 3, 2, 1), floats(1, 2, 7, 4, 3), dtypes=F32_ONLY),
]

RESAMPLING = [
    row("upsample_linear1d_backward", floats(1, 2, 7), [7], [1, 2, 4], False, dtypes=F32_ONLY),
    row(
        "upsample_bilinear2d_backward",
        cases=[(floats(1, 2, 6, 9), [6, 9], [1, 2, 3, 4], False), (floats(1, 2, 6, 9), [6, 9], [1, 2, 3, 4], True)],
        dtypes=F32_ONLY,
    ),
    row("upsample_trilinear3d_backward", floats(1, 1, 4, 6, 3), [4, 6, 3], [1, 1, 2, 3, 5], True, dtypes=F32_ONLY),
    row("upsample_bicubic2d_backward", floats(1, 2, 6, 9), [6, 9], [1, 2, 3, 4], False, dtypes=F32_ONLY, loose=4),
    row("upsample_nearest1d_backward", floats(1, 2, 7), [7], [1, 2, 3], dtypes=F32_ONLY),
    row("upsample_nearest3d_backward", floats(1, 1, 4, 6, 3), [4, 6, 3], [1, 1, 2, 3, 5], dtypes=F32_ONLY),
    row("_upsample_nearest_exact1d_backward", floats(1, 2, 7), [7], [1, 2, 3], dtypes=F32_ONLY),
    row("_upsample_nearest_exact2d_backward", floats(1, 2, 7, 3), [7, 3], [1, 2, 3, 2], dtypes=F32_ONLY),
    row("_upsample_nearest_exact3d_backward", floats(1, 1, 4, 6, 3), [4, 6, 3], [1, 1, 2, 3, 5], dtypes=F32_ONLY),
    row("replication_pad1d_backward", floats(1, 2, 8), floats(1, 2, 5), [1, 2], dtypes=F32_ONLY),
    row("replication_pad2d_backward", floats(1, 2, 6, 8), floats(1, 2, 3, 5), [1, 2, 0, 3], dtypes=F32_ONLY),
    row("replication_pad3d_backward", floats(1, 3, 6, 8), floats(1, 2, 3, 5), [1, 2, 0, 3, 1, 0], dtypes=F32_ONLY),
]


def distance_gradient(p):
    return row(
        f"_cdist_backward/p = {p}",
        lambda g, x, y: aten._cdist_backward(g, x, y, p, aten._cdist_forward(x, y, p, None)),
        floats(2, 3, 4),
        floats(2, 3, 5),
        floats(2, 4, 5),
        dtypes=F32_ONLY,
        loose=8,
    )


DISTANCES = [distance_gradient(p) for p in (0.0, 1.0, 1.5, 2.0, 3.0, float("inf"))]

Q = floats(1, 2, 5, 4)
ATTENTION = [
    row(
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        cases=[(Q, Q, Q, Q, Q, floats(1, 2, 5), 0.0, False), (Q, Q, Q, Q, Q, floats(1, 2, 5), 0.0, True)],
        dtypes=F32_ONLY,
        loose=8,
    ),
    row(
        "mlx::after",
        lambda x, y: (x.exp() + 1, after(x, y).exp() + 1),
        floats(3, 4),
        floats(2),
        dtypes=F32_ONLY,
        nodes=["IdCopyNode"],
    ),
]

STRIDES = [
    row("prims::copy_strided", lambda x: torch.ops.prims.copy_strided(x.exp(), [1, 3]) + 1, floats(3, 4), traced=True)
]

ROWS = [*CONVOLUTION, *POOLING, *RESAMPLING, *DISTANCES, *STRIDES, *ATTENTION]
test_op_row = pytest_function(ROWS)
