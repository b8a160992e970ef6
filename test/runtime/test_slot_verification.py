"""The runtime verifies every tensor slot of every node: its id, and that constants and inputs are not written."""

import re
from pathlib import Path

import pytest
import torch
from irprograms import Graph, ir, lit, number

OPERATIONS = Path(__file__).parents[2] / "backends/mlx/runtime/ops"
SLOTS = [(op, f) for op in ir.OPS.values() for f in op.FIELDS if f.type in ("Tid", "[Tid]")]
OUTPUTS = [(op, f) for op, f in SLOTS if f.output]


def legal_value(graph: Graph, type_: str):
    """A legal value of a required field."""
    if type_.startswith("["):
        return [legal_value(graph, type_.strip("[]"))]
    values = {
        "Tid": graph.new_temp,
        "Vid": graph.new_value,
        "IntOrVid": lambda: lit(0),
        "FloatOrVid": lambda: number(0.0),
        "VidOrTid": lambda: ir.VidOrTid(tid=graph.new_temp()),
        "IntOrVidOrTid": ir.IntOrVidOrTid,
        "string": str,
    }
    return values[type_]() if type_ in values else 0


def expect_refusal(graph: Graph, op: type[ir.Op], field: ir.Field, slot: ir.Tid) -> None:
    """Load a program with one `op` that has `slot` in `field`, and expect an error."""
    fields = {f.name: legal_value(graph, f.type) for f in op.FIELDS if f.required}
    fields[field.name] = [slot] if field.type == "[Tid]" else slot
    graph.emit(op(**fields))
    with pytest.raises(RuntimeError):
        graph.load()


def label(parameter) -> str:
    return parameter.name if isinstance(parameter, ir.Field) else parameter.NAME


@pytest.mark.parametrize("op, field", SLOTS, ids=label)
def test_slot_out_of_range_is_refused(op, field, capfd):
    expect_refusal(Graph(), op, field, ir.Tid(999))
    assert f"({op.NAME}): {field.name}: tensor slot 999 is out of range" in capfd.readouterr().err


@pytest.mark.parametrize("op, field", OUTPUTS, ids=label)
def test_write_to_constant_is_refused(op, field, capfd):
    graph = Graph()
    expect_refusal(graph, op, field, graph.constant(torch.ones(1)))
    assert f"({op.NAME}): {field.name}: tensor slot 0 is a constant and cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize("op, field", OUTPUTS, ids=label)
def test_write_to_input_is_refused(op, field, capfd):
    graph = Graph()
    expect_refusal(graph, op, field, graph.input((1,)))
    assert f"({op.NAME}): {field.name}: tensor slot 0 is an input and cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize("file", sorted(OPERATIONS.glob("*.h")), ids=lambda file: file.stem)
def test_operations_write_no_operand(file):
    """The verifier protects the slots of the fields that the schema marks as outputs, and no others."""
    outputs = {f.name for _, f in OUTPUTS} | {f.name for op in ir.OPS.values() for f in op.FIELDS if f.output}
    written = re.findall(r"\bc\.set\(n\.(\w+)\(\)", file.read_text())
    assert {*written} <= outputs
