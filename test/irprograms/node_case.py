"""Tests of one IR node: a case has the IR node, its inputs, its other fields, and the expected outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from executorch_mlx.serialization import ir

from .graph import Graph

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64, torch.uint8)
# In half precision, the tolerance is two units in the last place.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


@dataclasses.dataclass(frozen=True)
class NodeCase:
    """A test of one IR node. `inputs` has the inputs, and `fields` the other fields, by name of the field.

    `expected` takes the inputs by field name and returns the output, or a list of outputs. The case runs once for each
    of `dtypes`: floating-point inputs are cast to that dtype, and other inputs stay as they are.
    """

    node: type[ir.Op]
    inputs: dict[str, Any]
    expected: Callable[..., Any]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    note: str = ""

    def name(self, dtype: torch.dtype) -> str:
        label = f"{self.node.NAME}-{str(dtype).removeprefix('torch.')}"
        return f"{label}-{self.note}" if self.note else label


def parametrize(cases: list[NodeCase]):
    """Return a decorator that runs a test with the arguments `case` and `dtype`, for every case and dtype."""
    params = [pytest.param(case, dtype, id=case.name(dtype)) for case in cases for dtype in case.dtypes]
    return pytest.mark.parametrize("case, dtype", params)


def random(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    """Uniform values, which depend only on the arguments."""
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(*shape, generator=generator) * (high - low) + low


def random_indices(*shape: int, high: int) -> torch.Tensor:
    """Uniform integers in [0, high), which depend only on the arguments."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape) + high))


def build(case: NodeCase, inputs: dict[str, Any], outputs: list[torch.Tensor]) -> Graph:
    """Return a program with one instruction, with inputs and outputs of the given shapes and dtypes."""
    g = Graph()

    def slot(value):
        if isinstance(value, list):
            return [slot(item) for item in value]
        return g.input(value.shape, value.dtype)

    slots = {name: slot(value) for name, value in inputs.items()}
    outs = [g.output(output.shape, output.dtype) for output in outputs]
    names = [field.name for field in case.node.FIELDS if field.output]
    out = {"outs": outs} if names == ["outs"] else dict(zip(names, outs, strict=True))
    g.emit(case.node(**slots, **out, **case.fields))
    return g


def inputs_and_outputs(case: NodeCase, dtype: torch.dtype) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the inputs of a case in `dtype`, and the outputs that torch computes from these inputs."""

    def cast(value):
        if isinstance(value, list):
            return [cast(item) for item in value]
        return value.to(dtype) if value.is_floating_point() else value

    inputs = {name: cast(value) for name, value in case.inputs.items()}
    outputs = case.expected(**inputs)
    return inputs, list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def check(case: NodeCase, dtype: torch.dtype) -> None:
    """Run a case and compare the results with the expected outputs."""
    inputs, outputs = inputs_and_outputs(case, dtype)
    args = []
    for value in inputs.values():
        args.extend(value if isinstance(value, list) else [value])
    results = build(case, inputs, outputs).run(*args)
    tolerance = TOLERANCE.get(dtype, 1e-5)
    for result, output in zip(results, outputs, strict=True):
        assert result.dtype == output.dtype
        if output.dtype.is_floating_point:
            torch.testing.assert_close(result.float(), output.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
        else:
            assert torch.equal(result, output), (result, output)
