"""Joins the gradients of slices that cover a tensor, such as the halves that rotary embeddings exchange.

torch writes the gradient of each slice to a tensor of zeros, and adds these tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
_ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)


class _Part(NamedTuple):
    source: Node
    dim: int
    start: int
    stop: int
    size: int  # of the whole tensor, along `dim`


def join_slices(graph_module: GraphModule) -> None:
    """Replace each sum of two tensors that are zero outside of complementary slices, in place."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target is not aten.add.Tensor or node.kwargs or node.args[0] is node.args[1]:
            continue
        parts = [_part(operand) for operand in node.args]
        if None in parts:
            continue
        first, second = sorted(parts, key=lambda part: part.start)
        covers = first.start == 0 and first.stop == second.start and second.stop == second.size
        if covers and first.dim == second.dim and first.source.meta["val"].dtype == second.source.meta["val"].dtype:
            with graph.inserting_before(node):
                joined = graph.call_function(aten.cat.default, ([first.source, second.source], first.dim))
            joined.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(joined)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph_module.recompile()


def _part(node: Node) -> _Part | None:
    """Return the slice outside of which `node`, which nothing else uses, is zero."""
    if not isinstance(node, Node) or node.target is not aten.slice_scatter.default or len(node.users) > 1:
        return None
    zeros, source, *place = node.args
    given = dict(zip(("dim", "start", "stop", "step"), place))
    dim, start, stop = given.get("dim", 0), given.get("start"), given.get("stop")
    is_zeros = isinstance(zeros, Node) and zeros.target in _ZEROS
    if (
        node.kwargs
        or not is_zeros
        or not isinstance(source, Node)
        or not isinstance(dim, int)
        or given.get("step", 1) != 1
    ):
        return None
    shape = node.meta["val"].shape
    size = shape[dim]
    start, stop = start or 0, size if stop is None else stop
    if not (isinstance(start, int) and isinstance(stop, int) and isinstance(size, int)):
        return None
    return _Part(source, dim % len(shape), start, min(stop, size), size)
