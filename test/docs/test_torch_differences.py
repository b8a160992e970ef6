"""The rows of docs/torch-differences.md: the results of this runtime that differ from torch on purpose."""

import math

import pytest
import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from loaded_method import LoadedMethod

INF, NAN = float("inf"), float("nan")
INDICES = torch.tensor([0, 9])
TABLE = torch.arange(6.0).reshape(3, 2)


class Wrapped(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


def run(function, *inputs) -> torch.Tensor:
    partitioner = MLXPartitioner()
    manager = to_edge_transform_and_lower(
        torch.export.export(Wrapped(function), inputs),
        partitioner=[partitioner],
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    assert partitioner.explain().refused == ()
    return LoadedMethod(manager.to_executorch().buffer).execute(list(inputs))[0]


def rms_norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def tensor(*values, dtype=None):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    "function, inputs",
    [
        (lambda table, i: torch.embedding(table, i), (TABLE, INDICES)),
        (lambda x, i: x.gather(0, i), (tensor(1.0, 2.0), INDICES)),
        (lambda x, i, y: x.index_copy(0, i, y), (tensor(1.0, 2.0), INDICES, tensor(3.0, 4.0))),
        (lambda a, b: a // b, (tensor(7, 8), tensor(0, 2))),
        (lambda a, b: a % b, (tensor(7, 8), tensor(0, 2))),
    ],
    ids=["embedding", "gather", "index_copy", "floor_divide", "remainder"],
)
def test_available_values_are_checked(delegate, function, inputs):
    with pytest.raises((RuntimeError, IndexError)):
        function(*inputs)
    with pytest.raises(RuntimeError):
        run(function, *inputs)


@pytest.mark.parametrize(
    "function, inputs, expected",
    [
        (lambda table, i: torch.embedding(table, (i + 2) // 2), (TABLE, tensor(1, 90)), TABLE[[1, 2]]),
        (lambda x, i: x.gather(0, (i + 2) // 2), (tensor(1.0, 2.0, 3.0), tensor(-2, 90)), tensor(1.0, 3.0)),
        (lambda x, i: x.gather(0, i), (tensor(1.0, 2.0, 3.0), tensor(-1)), tensor(3.0)),
        (lambda a, b: a // (b * 2), (tensor(7, 8), tensor(0, 2)), tensor(0, 2)),
        (lambda a, b: a % (b * 2), (tensor(7, 9), tensor(0, 2)), tensor(0, 1)),
        (lambda a, b: torch.fmod(a, b * 2), (tensor(7, 9), tensor(0, 2)), tensor(0, 1)),
        (
            lambda a, b: a // (b * 1),
            (tensor(-(2**31), dtype=torch.int32), tensor(-1, dtype=torch.int32)),
            tensor(-(2**31), dtype=torch.int32),
        ),
        (torch.signbit, (tensor(NAN, -NAN, -0.0),), tensor(False, False, True)),
        (torch.copysign, (tensor(1.0), tensor(-NAN)), tensor(1.0)),
        (lambda x: x.softmax(0) * 2.0**126, (tensor(89.0, 1.0),), tensor(2.0**126, 0.0)),
        (
            lambda x: torch.stack([x.cosh(), x.sinh()]),
            (torch.full((8,), 89.0),),
            (torch.full((2, 8), 88.0).exp() * (math.e / 2)),
        ),
        (
            lambda x: x % 1e-30,
            (torch.full((8,), 1e20),),
            torch.full((8,), math.fmod(tensor(1e20).item(), tensor(1e-30).item())),
        ),
        (lambda x: x.mode()[0], (tensor(NAN, 1.0, NAN, 0.0),), torch.tensor(0.0)),
        (rms_norm, (torch.full((1, 8), 300, dtype=torch.float16),), torch.ones(1, 8, dtype=torch.float16)),
        (torch.nn.functional.gelu, (tensor(INF, 1.0),), torch.nn.functional.gelu(tensor(1.0)) * tensor(INF, 1)),
        (lambda x: torch.topk(x, 2)[1], (tensor(1.0, 3.0, 3.0, 3.0),), tensor(1, 2)),
        (lambda x, i, v: x.index_put([i], v), (torch.zeros(2), tensor(1, 1), tensor(5.0, 6.0)), tensor(0.0, 6.0)),
    ],
)
def test_results_that_differ_from_torch(delegate, function, inputs, expected):
    torch.testing.assert_close(run(function, *inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_dtypes_that_are_never_delegated(dtype):
    partitioner = MLXPartitioner()
    exported = torch.export.export(Wrapped(lambda x: x + 1), (torch.zeros(2, dtype=dtype),))
    config = EdgeCompileConfig(_check_ir_validity=False)
    to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    assert partitioner.explain().delegated == 0
