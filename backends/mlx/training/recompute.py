"""Keeps what gradient checkpointing recomputes apart from what it computed first.

`torch.utils.checkpoint` runs a part of the forward pass again during the backward pass, so that the results of the
first run need not be kept. In a traced graph, both runs are equal operators with equal operands. The compiler would
compute them once, and keep the results. `keep_recomputed` therefore gives the second run its operands through
`mlx::after`, an operator that returns its operand unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten, tree_map_only

from ..custom_ops.primitives import after

aten = torch.ops.aten
_SAME_VALUE = (aten.detach.default, aten.alias.default)


def keep_recomputed(graph_module: GraphModule) -> None:
    """Change the graph of a forward and a backward pass, whose first result is the loss, in place."""
    graph = graph_module.graph
    nodes = list(graph.nodes)
    last = nodes.index(_without_detach(graph.output_node().args[0][0]))  # of the forward pass
    forward = set(nodes[: last + 1])
    first: dict[Any, Node] = {}  # the expression of a value → the node of the forward pass that computes it
    same: dict[Node, Node] = {}  # node → the node of the forward pass with the same value, or the node itself
    delayed: dict[Node, Node] = {}
    gradient = nodes[last]
    for node in nodes:
        if node.op != "call_function":
            same[node] = node
        elif node.target in _SAME_VALUE:
            same[node] = same[node.args[0]]
        elif node in forward:
            same[node] = first.setdefault(_expression(node, same), node)
        elif (expression := _expression(node, same)) in first:
            same[node] = first[expression]
            operands = [n for n in node.all_input_nodes if n in forward and same[n].op != "placeholder"]
            _delay(node, operands, gradient, delayed)
        else:
            same[node] = gradient = node
    graph_module.recompile()


def _without_detach(node: Node) -> Node:
    while node.target in _SAME_VALUE:
        node = node.args[0]
    return node


def _expression(node: Node, same: dict[Node, Node]) -> Any:
    """Return a dictionary key: nodes with equal keys compute equal values."""
    leaves, spec = tree_flatten(tree_map_only(Node, same.__getitem__, (node.args, node.kwargs)))
    return node.target, str(spec), tuple(leaf if isinstance(leaf, Node) else repr(leaf) for leaf in leaves)


def _delay(node: Node, operands: list[Node], gradient: Node, delayed: dict[Node, Node]) -> None:
    """Give `node`, which recomputes a value, its `operands` of the forward pass through `after`.

    `gradient` is the last node before `node` that computes a gradient.
    """
    for operand in operands:
        if operand not in delayed:
            with node.graph.inserting_before(node):
                delayed[operand] = node.graph.call_function(after, (operand, gradient))
        node.replace_input_with(operand, delayed[operand])
