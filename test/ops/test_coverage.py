"""Every target in the registry has a row."""

import importlib
from pathlib import Path

from executorch_mlx.builder.registry import REGISTRY
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.generate import FIRST_OWN_OP
from oprows.lowering import target_name

# What no exported program and no traced text holds: torch decomposes it first, on every way
# to the registry. Or what is a check of the host's, for which there is nothing to compute.
WITHOUT_ROW = {
    "aten.chunk.default": "becomes split.Tensor",
    "aten.contiguous.default": "disappears",
    "aten.dropout.default": "disappears",
    "aten.flatten.using_ints": "becomes view",
    "aten.movedim.int": "becomes permute",
    "aten.narrow.default": "becomes slice.Tensor",
    "aten.reshape.default": "becomes view",
    "aten.split.sizes": "becomes split_with_sizes",
    "aten.sym_numel.default": "becomes products of sym_size.int",
    "aten.tile.default": "becomes repeat",
    "aten.unflatten.int": "becomes view",
    "aten.item.default": "becomes _local_scalar_dense",
    "aten._assert_scalar.default": "a check; rows of item have it",
    "aten._assert_tensor_metadata.default": "a check; rows of _to_copy have it",
    "aten.sym_constrain_range.default": "a check",
    "aten.sym_constrain_range_for_size.default": "a check",
    "torch.sym_not": "part of a check",
    **{f"operator.{n}": "part of a check" for n in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_")},
}


def rows():
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        yield from getattr(importlib.import_module(path.stem), "ROWS", [])


def test_every_target_has_a_row():
    registered = {target_name(t) for t in REGISTRY.handlers}
    assert registered - {r.target for r in rows()} - set(WITHOUT_ROW) == set()


def test_every_node_of_ours_has_a_row_that_asks_for_it():
    own = {op.NAME for op in ir.OPS.values() if op.OP_TYPE >= FIRST_OWN_OP}
    assert own - {node for r in rows() for node in r.fused} == set()


def test_exceptions_are_needed():
    registered = {target_name(t) for t in REGISTRY.handlers}
    assert set(WITHOUT_ROW) - registered == set()
    assert set(WITHOUT_ROW) & {r.target for r in rows()} == set()


def test_names_are_unique():
    names = [r.name for r in rows()]
    assert sorted({n for n in names if names.count(n) > 1}) == []
