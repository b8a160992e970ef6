"""The types that `inspect` infers are those that the runtime makes: every row of test/runtime."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "runtime"))

import test_node_elementwise
import test_node_index
import test_node_nn
import test_node_reduce
import test_node_shape
from executorch_mlx.cli.listing import row as listed
from executorch_mlx.cli.rules import RULES
from executorch_mlx.cli.types import Env, Type
from executorch_mlx.cli.walk import persistent_type
from executorch_mlx.serialization import ir
from rows import build, inputs_and_wants

ROWS = [r for m in (test_node_elementwise, test_node_index, test_node_nn, test_node_reduce, test_node_shape) for r in m.ROWS]


def test_every_op_with_results_has_a_rule():
    control = {"Noop", "If", "Scan", "While", "MetalKernel"}
    on_host = {"ItemInt", "SymSize", *(op.NAME.removesuffix("Node") for op in ir.OPS.values() if issubclass(op, ir.BinaryIntNode))}
    ops = {op.NAME.removesuffix("Node") for op in ir.OPS.values()}
    assert ops - RULES.keys() == control | on_host
    assert RULES.keys() <= ops


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda n: f"{n}-{ROWS[n].node.NAME}")
def test_types_are_those_that_come_out(number):
    row = ROWS[number]
    for dtype in row.dtypes:
        inputs, wants = inputs_and_wants(row, dtype)
        graph = build(row, inputs, wants).graph()
        (instruction,) = graph.instruction_chains[0].instructions
        types = {tid: persistent_type(m) for tid, m in enumerate(graph.tensor_meta)}
        env = Env({tid: t for tid, t in types.items() if tid < graph.num_input_tensors}, {})
        made = RULES[listed(instruction.op).op](instruction.op, env)
        made = made if isinstance(made, list) else [made]
        expected = [Type(tuple(w.shape), str(w.dtype).removeprefix("torch.")) for w in wants]
        assert [m.shape for m in made] == [e.shape for e in expected]
        # Mixed operands leave the dtype open; what is said has to be right.
        for m, e in zip(made, expected, strict=True):
            assert m.dtype in (None, e.dtype)
