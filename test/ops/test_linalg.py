"""Matrix products."""

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from oprows import Dyn, f32, floats, indices, pytest_function, row

N = Dyn("n", 3, also=(1, 7))
F32_ONLY = (f32,)
LOOSE = 4  # the factor of the tolerance: MLX adds the products in another order than torch

ROWS = [
    row(
        "mm",
        cases=[(floats(3, 4), floats(4, 5)), (floats(0, 4), floats(4, 5)), (floats(3, 0), floats(0, 2))],
        loose=LOOSE,
    ),
    row("bmm", cases=[(floats(2, 3, 4), floats(2, 4, 5))], loose=LOOSE),
    row(
        "matmul",
        cases=[
            (floats(2, 3, 4), floats(4, 5)),
            (floats(4), floats(4)),
            (floats(4), floats(4, 2)),
            (floats(2, 1, 3, 4), floats(5, 4, 2)),
            (floats(3, 4), floats(4)),
        ],
        dtypes=F32_ONLY,
        loose=10,
    ),
    row(
        "addmm",
        cases=[(floats(5), floats(3, 4), floats(4, 5)), (floats(3, 5), floats(3, 4), floats(4, 5))],
        loose=LOOSE,
    ),
    row(
        "addmm/scaled",
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        floats(3, 5),
        floats(3, 4),
        floats(4, 5),
        dtypes=F32_ONLY,
        loose=10,
    ),
    row(
        "linear",
        torch.nn.functional.linear,
        cases=[
            (floats(2, 3, 4), floats(5, 4)),
            (floats(3, 4), floats(5, 4), floats(5)),
            (floats(4), floats(5, 4), floats(5)),
        ],
        loose=LOOSE,
    ),
    row("linear/parameters", torch.nn.Linear(4, 5), floats(2, 3, 4), loose=LOOSE),
    row("linear/dynamic", torch.nn.Linear(4, 5), floats(2, N, 4), dtypes=F32_ONLY, loose=10),
    row("bmm/dynamic", torch.bmm, floats(2, N, 4), floats(2, 4, N), dtypes=F32_ONLY, loose=10),
    row(
        "mlx::gathered_matmul",
        floats(N, 1, 1, 4),
        floats(5, 3, 4),
        indices(N, 2, below=5),
        loose=LOOSE,
        nodes=["GatherMmNode"],
    ),
    row(
        "mlx::gathered_matmul/matrices",
        floats(2, 1, 3, 4),
        floats(5, 3, 4),
        indices(2, 2, below=5),
        dtypes=F32_ONLY,
        loose=10,
    ),
]

test_op_row = pytest_function(ROWS)


class Products(torch.nn.Module):
    def forward(self, x, y):
        return x @ y, torch.addmm(x, x, x), torch.bmm(x[None], x[None]), torch.nn.functional.linear(y, x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_product_of_integers_is_unsupported(dtype):
    """MLX multiplies only floating-point matrices."""
    program = torch.export.export(Products(), (torch.ones(4, 4, dtype=dtype), torch.ones(2, 4, 4, dtype=dtype)))
    partitioner = MLXPartitioner()
    to_edge_transform_and_lower(program, partitioner=[partitioner])
    products = [d for d in partitioner.explain().refused if "a matrix product of torch.int" in d.reason]
    assert len(products) == 4
