"""A test of one node is a row: node, inputs, the node's other fields, what torch says."""

import dataclasses
from typing import Any, Callable

import torch
from harness import Graph, ir

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int32, torch.int64, torch.uint8)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclasses.dataclass(frozen=True)
class Row:
    """`want` gets the inputs by field name, in the dtype of the run, and returns the
    output or the list of them. A float input is cast to each of `dtypes` in turn;
    other inputs stay as they are."""

    node: type[ir.Op]
    inputs: dict[str, Any]
    want: Callable[..., Any]
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = FLOATS
    tolerance: float = 1.0
    note: str = ""

    def cases(self):
        for dtype in self.dtypes:
            label = f"{self.node.NAME}-{str(dtype).removeprefix('torch.')}"
            yield dtype, f"{label}-{self.note}" if self.note else label


def cases(rows: list[Row]):
    """Arguments for pytest.mark.parametrize("row, dtype", ...)."""
    import pytest

    return [pytest.param(row, dtype, id=label) for row in rows for dtype, label in row.cases()]


def random(*shape: int, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.rand(*shape, generator=generator) * (high - low) + low


def build(row: Row, inputs: dict[str, Any], wants: list[torch.Tensor]) -> Graph:
    g = Graph()

    def slot(value):
        if isinstance(value, list):
            return [slot(item) for item in value]
        return g.input(value.shape, value.dtype)

    slots = {name: slot(value) for name, value in inputs.items()}
    outs = [g.output(want.shape, want.dtype) for want in wants]
    many = any(field.name == "outs" for field in row.node.FIELDS)
    out = {"outs": outs} if many else {"out": outs[0]}
    g.emit(row.node(**slots, **out, **row.fields))
    return g


def inputs_and_wants(row: Row, dtype: torch.dtype) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A row's inputs in `dtype`, and the outputs that torch makes of them."""

    def cast(value):
        if isinstance(value, list):
            return [cast(item) for item in value]
        return value.to(dtype) if value.is_floating_point() else value

    inputs = {name: cast(value) for name, value in row.inputs.items()}
    wants = row.want(**inputs)
    return inputs, list(wants) if isinstance(wants, (list, tuple)) else [wants]


def check(row: Row, dtype: torch.dtype) -> None:
    inputs, wants = inputs_and_wants(row, dtype)
    flat = []
    for value in inputs.values():
        flat.extend(value if isinstance(value, list) else [value])
    results = build(row, inputs, wants).run(*flat)
    tolerance = TOLERANCE.get(dtype, 1e-5) * row.tolerance
    for result, want in zip(results, wants, strict=True):
        assert result.dtype == want.dtype
        if want.dtype.is_floating_point:
            torch.testing.assert_close(
                result.float(), want.float(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        else:
            assert torch.equal(result, want), (result, want)
