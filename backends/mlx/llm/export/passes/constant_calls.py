"""Calls of constants, which are computed when a model is exported."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

# The operators to compute. ExecuTorch's own MLX delegate lacks erfinv, which Gemma 3n calls with a number of its
# config.
_TARGETS = (torch.ops.aten.erfinv.default,)


def compute_constant_calls(program: ExportedProgram) -> None:
    """Replace calls of some operators by their result, in place, if it is one number that depends on constants only."""
    graph, signature = program.graph, program.graph_signature
    constants = {
        name: program.constants[target] for name, target in signature.inputs_to_lifted_tensor_constants.items()
    }
    calls = [(node, _value(node, constants)) for node in graph.nodes if node.target in _TARGETS]
    computed = [(node, value) for node, value in calls if value is not None]
    for node, value in computed:
        with graph.inserting_before(node):
            options = {"dtype": value.dtype, "device": value.device}
            result = graph.call_function(torch.ops.aten.full.default, (list(value.shape), value.item()), options)
        result.meta = node.meta.copy()
        node.replace_all_uses_with(result)
    if computed:
        graph.eliminate_dead_code()
        program.graph_module.recompile()


class _NotConstant(Exception):
    pass


def _value(node: Node, constants: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The value of `node`, or None if it depends on an input, or on more than single numbers."""

    def compute(node: Node) -> Any:
        if node.op == "placeholder" and node.name in constants:
            value = constants[node.name].clone()
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            value = node.target(*map_arg(node.args, compute), **map_arg(node.kwargs, compute))
        else:
            raise _NotConstant
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise _NotConstant
        return value

    try:
        return compute(node)
    except _NotConstant:
        return None
