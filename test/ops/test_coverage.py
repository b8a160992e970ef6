"""Every target in the registry and every extension has an op row."""

import importlib
from pathlib import Path

from executorch_mlx.builder.registry import REGISTRY
from executorch_mlx.serialization import ir
from oprows.lowering import target_name

# The registered targets without an op row, and the reason. Assertions compute nothing. The loops and the composites
# have other tests.
WITHOUT_OP_ROW = {
    "aten._assert_scalar.default": "an assertion; op rows of item contain it",
    "aten._assert_tensor_metadata.default": "an assertion; op rows of _to_copy contain it",
    "aten.sym_constrain_range.default": "an assertion",
    "aten.sym_constrain_range_for_size.default": "an assertion",
    "aten.sym_numel.default": "of traced composites; test_more_families.py and test_mtp.py export models with it",
    "torch.sym_not": "part of a condition; the op row of operator.gt contains it",
    **{f"mlx.{n}.default": "takes the place of that of torch" for n in ("lstm", "gru", "rnn_tanh", "rnn_relu")},
    "mlx.token_logprobs.default": "a composite; test/custom_kernel_ops compares it with eager torch",
    "mlx.top_logprobs.default": "a composite; test/custom_kernel_ops compares it with eager torch",
    "mlx.gated_delta_rule.default": "a loop; test_recurrence.py compares it with its formula",
    "mlx.gated_linear_attention.default": "a loop; test_recurrence.py compares it with its formula",
    "mlx.selective_scan.default": "a loop; test_recurrence.py compares it with its formula",
    "mlx.diagonal_recurrence.default": "a loop; test_recurrence.py compares it with its formula",
    **{f"operator.{n}": "part of a condition, like operator.gt" for n in ("eq", "ne", "lt", "le", "ge", "and_", "or_")},
}

NODES_WITHOUT_OP_ROW = {
    "AllGatherNode",
    "AllSumNode",  # of earlier versions: refused at load
    "GatedRecurrenceNode",
    "SelectiveScanNode",  # replacements of loops; test_recurrence.py names them
}


def op_rows():
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        yield from getattr(importlib.import_module(f"{__package__}.{path.stem}"), "ROWS", [])


def test_every_target_has_an_op_row():
    registered = {target_name(t) for t in REGISTRY.handlers}
    assert registered - {r.target for r in op_rows()} - set(WITHOUT_OP_ROW) == set()


def test_every_extension_has_an_op_row_that_names_it():
    extensions = {op.NAME for op in ir.OPS.values() if op.OP_TYPE >= ir.FIRST_EXTENSION}
    assert extensions - {node for r in op_rows() for node in r.nodes} == NODES_WITHOUT_OP_ROW


def test_targets_without_op_row_are_registered_and_have_none():
    registered = {target_name(t) for t in REGISTRY.handlers}
    assert set(WITHOUT_OP_ROW) - registered == set()
    assert set(WITHOUT_OP_ROW) & {r.target for r in op_rows()} == set()


def test_names_of_op_rows_are_unique():
    names = [r.name for r in op_rows()]
    assert sorted({n for n in names if names.count(n) > 1}) == []
