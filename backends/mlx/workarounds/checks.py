"""Checks of the elements of a tensor, `torch._check_tensor_all`.

torch.export makes `torch.sym_ite` of them, which ExecuTorch's edge dialect refuses. The delegate repeats no assertions,
so that the checks can be removed. Many models of Transformers check the number of image tokens in this way.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

aten = torch.ops.aten

_ASSERTIONS = (aten._assert_scalar.default, aten.sym_constrain_range.default)


def remove_checks(program: ExportedProgram) -> None:
    """Remove from `program`, in place, each `torch.sym_ite` that only assertions read, and what only it reads."""
    graph = program.graph
    for choice in graph.find_nodes(op="call_function", target=torch.sym_ite):
        dependents = _dependents(choice)
        if all(node.target in _ASSERTIONS for node in dependents if not node.users):
            for node in sorted(dependents, reverse=True):
                graph.erase_node(node)
            _erase_unused(choice)


def _dependents(node: Node) -> set[Node]:
    """Return the nodes that depend on `node`."""
    nodes: set[Node] = set()
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        if user not in nodes:
            nodes.add(user)
            waiting += user.users
    return nodes


def _erase_unused(node: Node) -> None:
    """Erase `node`, and the operands that nothing else reads."""
    operands = node.all_input_nodes
    node.graph.erase_node(node)
    for operand in operands:
        if operand.op == "call_function" and not operand.users and not operand.is_impure():
            _erase_unused(operand)
