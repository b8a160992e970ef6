"""Compares the types that the inspector infers with the types that a program declares."""

from __future__ import annotations

from executorch_mlx.serialization import ir
from executorch_mlx.serialization.infer_types import declared_type, infer_types
from executorch_mlx.serialization.type_rules import rule_of
from executorch_mlx.serialization.types import Type

RULES = "backends/mlx/serialization/type_rules.py"
# infer_types handles loops itself. The results of a Metal kernel depend on its source.
NO_RULE = {ir.ScanNode, ir.WhileNode, ir.MetalKernelNode}


def problems(graph: ir.MLXGraph) -> list[str]:
    """Return a message for each instruction that has no type rule, and for each whose type rule is wrong.

    A wrong rule is found only in the main chain.
    """
    declared = {tid: declared_type(meta) for tid, meta in enumerate(graph.tensor_meta)}
    found = []
    for typed in infer_types(graph):
        op = type(typed.instruction.node)
        if typed.inferred and rule_of(op) is None and op not in NO_RULE:
            found.append(f"{op.NAME} has no type rule: add one for {op.TABLE.__name__} or {op.NAME} to {RULES}")
        if typed.instruction.chain != graph.main_chain_idx:
            continue  # a loop's body writes one slice at a time to an output, whose declared type is the whole stack
        for tid, inferred in typed.inferred.items():
            if tid in declared and not _agree(inferred, declared[tid]):
                found.append(
                    f"{op.NAME}: the inspector infers {inferred}, expected {declared[tid]}:"
                    f" add a rule for {op.NAME} to {RULES}"
                )
    return found


def _agree(a: Type, b: Type) -> bool:
    """Whether two types have no contradiction in the parts that are known in both."""
    if a.dtype and b.dtype and a.dtype != b.dtype:
        return False
    if a.shape is None or b.shape is None:
        return True
    return len(a.shape) == len(b.shape) and all(x == y or x is None or y is None for x, y in zip(a.shape, b.shape))
