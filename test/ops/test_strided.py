"""diagonal, as_strided and unfold."""

import pytest
import torch
from executorch.exir import to_edge, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from oprows import Dyn, f16, f32, floats, i64, pytest_function, row

F32_ONLY = (f32,)
N = Dyn("n", 6, also=(4, 9), min=4)

ROWS = [
    row(
        "diagonal_copy",
        torch.diagonal,
        cases=[(floats(2, 3, 4), 1, 0, 2)],
        once=[
            (floats(4, 5),),
            (floats(4, 5), -3),
            (floats(5, 2), -1),
            (floats(2, 5), 4),
            (floats(3, 3), 3),
            (floats(3, 3), -5),
            (floats(2, 3, 4), -1, -1, 1),
        ],
        dtypes=(f32, f16, i64),
    ),
    row("diagonal_copy/dynamic", lambda x: x.diagonal(1, 1, 2), floats(N, 3, 4), dtypes=F32_ONLY),
    row(
        "diagonal_copy/dynamic axis",
        lambda x: torch.diagonal(x) + 0,
        floats(N, 4),
        dtypes=F32_ONLY,
        host="a dynamic axis",
    ),
    row("diagonal", floats(3, 4), 1, dtypes=F32_ONLY, traced=True),
    row(
        "as_strided_copy",
        lambda x, *how: x.as_strided(*how) + 1,
        cases=[
            (floats(4, 5), (2, 3), (1, 2)),
            (floats(4, 5), (3, 3), (5, 1), 6),
            (floats(12), (5, 4), (2, 1)),
            (floats(4), (), (), 2),
            (floats(4), (3, 2), (0, 1)),
            (floats(4), (0, 2), (1, 1)),
        ],
        dtypes=F32_ONLY,
    ),
    row("as_strided", floats(4, 5), (2, 3), (1, 2), 1, dtypes=F32_ONLY, traced=True),
    row(
        "as_strided_copy/view",
        lambda x: [
            view.as_strided(*how) + 1
            for view in (
                (x + 1).split(2)[1],
                (x + 1).t(),
                (x + 1)[2:].reshape(2, 5),
                x.t().reshape(-1)[3:],
                x.t().reshape(-1),
                x[1:, 2:].unbind(1)[0],
            )
            for how in (((4,), (2,)), ((2, 2), (1, 3), 1), ((3,), (1,), 0))
        ],
        floats(4, 5),
        dtypes=F32_ONLY,
    ),
    row(
        "unfold_copy",
        lambda x, *how: x.unfold(*how),
        cases=[(floats(4, 5), 0, 2, 1), (floats(4, 5), -1, 3, 2), (floats(7), 0, 7, 3), (floats(2, 6, 3), 1, 1, 4)],
        dtypes=F32_ONLY,
    ),
    row("unfold_copy/dynamic", lambda x: x.unfold(1, 3, 1), floats(2, N), dtypes=F32_ONLY),
    row("unfold", floats(4, 5), 1, 2, 2, dtypes=F32_ONLY, traced=True),
]

test_op_row = pytest_function(ROWS)


class OfTransposed(torch.nn.Module):
    def forward(self, x):
        return x.t().as_strided((2, 2), (1, 2)) + 1


def test_as_strided_of_a_view_is_unsupported_without_its_storage():
    """The strides refer to the storage of the viewed tensor, which the graph does not show after `to_edge`."""
    partitioner = MLXPartitioner()
    to_edge(torch.export.export(OfTransposed(), (torch.zeros(3, 4),))).to_backend(partitioner)
    (refused,) = partitioner.explain().refused
    assert "as_strided of a view is unsupported" in refused.reason


def test_as_strided_of_a_view_of_a_column_major_tensor_is_refused():
    program = torch.export.export(OfTransposed(), (torch.zeros(3, 4).t(),))
    with pytest.raises(ValueError, match="a view of a tensor that is not row-major"):
        to_edge_transform_and_lower(program, partitioner=[MLXPartitioner()])
