"""Computes the end of a model only for the token whose result is used.

A call with several tokens of a prompt returns the logits of the last one. The model itself computes its last layer for
all tokens: the keys and values of all of them are needed, but what follows the attention is needed for the last token
alone. `narrow_to_last_token` moves the selection of the last token back through the graph, up to the operators whose
other results are used.

The rules below say how an operator treats an axis of its result: which axes of which operands the selection moves to.
An operator without a rule is not changed, and the selection takes place after it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from ....custom_kernel_ops.int8_activations import int8_quantized_matmul
from ....custom_ops.quantized import gathered_matmul, gathered_quantized_matmul, quantized_matmul
from ....extents import is_same_shape

_aten = torch.ops.aten
_END = 2**63 - 1  # torch's end of a slice up to the last element
_ASSERTIONS = (_aten._assert_tensor_metadata.default,)  # about dtypes, not about shapes
Axes = dict[Node, int]
Rule = Callable[[Node, int], Axes | None]


def narrow_to_last_token(program: ExportedProgram) -> None:
    """Move selections of the last element of an axis of dynamic size towards the inputs of the graph, in place."""
    graph = program.graph
    fake_mode = detect_fake_mode([node.meta.get("val") for node in graph.nodes if node.op == "placeholder"])
    selections = [node for node in graph.nodes if fake_mode is not None and _selects_last(node)]
    for selection in selections:
        region = _Region(graph, selection)
        if any(node.target in _PRODUCTS for node in region.operands):  # otherwise, little would be gained
            with fake_mode, torch.no_grad():
                region.narrow()
    if selections:
        graph.eliminate_dead_code()
        program.graph_module.recompile()


def _selects_last(node: Node) -> bool:
    """Whether `node` selects the last element of an axis of dynamic size."""
    if node.target is _aten.slice.Tensor:
        is_last = len(node.args) == 4 and node.args[2:] == (-1, _END)
    else:
        is_last = node.target is _aten.select.int and node.args[2] == -1
    return is_last and isinstance(_shape(node.args[0])[node.args[1]], torch.SymInt)


class _Region:
    """The nodes that need to be computed for the last element only.

    - `axes`: the axis of these nodes, and of those after which the last element is selected.
    - `operands`: for each node of the region, the operands that have this axis too.
    """

    def __init__(self, graph: Graph, selection: Node):
        self.graph, self.selection = graph, selection
        self.source: Node = selection.args[0]
        self.axes: Axes = {self.source: selection.args[1] % len(_shape(self.source))}
        self.operands: dict[Node, Axes] = {}
        for node in reversed(graph.nodes):
            if node in self.axes:
                self._add(node, self.axes[node])

    def _add(self, node: Node, axis: int) -> None:
        """Add `node` to the region if all its users need only the last element, and there is a rule."""
        needs_all = (
            user
            for user in node.users
            if user is not self.selection and user.target not in _ASSERTIONS and node not in self.operands.get(user, ())
        )
        operands = None if any(needs_all) else _operands(node, axis)
        if operands is not None and all(self.axes.get(x, axis) == axis for x, axis in operands.items()):
            self.operands[node] = operands
            self.axes |= operands
        elif isinstance(node.meta["val"], (list, tuple)):  # the last elements of its results are selected
            del self.axes[node]
            for user in node.users:
                self.operands.pop(user, None)

    def narrow(self) -> None:
        """Change the nodes of the region, and select the last element of the other nodes."""
        selected = {}
        for node in [node for node in self.axes if node not in self.operands]:
            with self.graph.inserting_after(node):
                last = self.graph.call_function(_aten.slice.Tensor, (node, self.axes[node], -1, _END))
            last.meta = {**node.meta, "val": _aten.slice.Tensor(node.meta["val"], self.axes[node], -1, _END)}
            selected[node] = last
        for node in [node for node in self.graph.nodes if node in self.operands]:
            self._narrow(node, {x: selected[x] for x in self.operands[node] if x in selected})
        self.selection.replace_input_with(self.source, selected.get(self.source, self.source))
        if self.selection.target is _aten.slice.Tensor:
            self.selection.replace_all_uses_with(self.selection.args[0])

    def _narrow(self, node: Node, selected: dict[Node, Node]) -> None:
        for operand, last in selected.items():
            node.replace_input_with(operand, last)
        if node.target in _RESHAPES:
            sizes = list(node.args[1])
            sizes[self.axes[node]] = 1
            node.args = (node.args[0], sizes)
        arguments, options = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
        node.meta["val"] = node.target(*arguments, **options)
        for user in [user for user in node.users if user.target in _ASSERTIONS]:
            self.graph.erase_node(user)


# -- rules ------------------------------------------------------------------------------------------
#
# A rule takes a node and an axis of its result, at least 0. It returns the operands that have this axis too, with the
# place of the axis there, or None if the result at a place of the axis needs operands at other places.


def _operands(node: Node, axis: int) -> Axes | None:
    """Apply the rule of the operator. Returns None if there is none."""
    target = node.target
    rule = _RULES.get(target)
    if isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable:
            return None
        rule = _pointwise if rule is None and torch.Tag.pointwise in target.tags else rule
    return None if node.op != "call_function" or rule is None else rule(node, axis)


def _shape(node: Node) -> Sequence[Any]:
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).shape


def _pointwise(node: Node, axis: int) -> Axes:
    """Operands broadcast: their axes count from the last one."""
    place, size = axis - len(_shape(node)), _shape(node)[axis]
    axes = {}
    for operand in (x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)):
        shape = _shape(operand)
        if len(shape) >= -place and is_same_shape([shape[place]], [size]):
            axes[operand] = len(shape) + place
    return axes


def _rows(node: Node, axis: int) -> Axes | None:
    """The result of a row depends on the same row of the first operand: all axes but the last are the same."""
    return {node.args[0]: axis} if axis < len(_shape(node)) - 1 else None


def _same_axes(node: Node, axis: int) -> Axes:
    return {node.args[0]: axis}


def _other_axis(place: int, default: int = 0) -> Rule:
    """The operator works along the axis that its argument number `place` names, and keeps all axes."""

    def rule(node: Node, axis: int) -> Axes | None:
        along = node.args[place] if len(node.args) > place else default
        return None if axis == along % len(_shape(node)) else {node.args[0]: axis}

    return rule


def _reduction(node: Node, axis: int) -> Axes | None:
    """A reduction over some axes, which the result keeps or not."""
    rank = len(_shape(node.args[0]))
    axes = node.args[1] if len(node.args) > 1 else None
    if axes is None or axes == []:
        return None
    reduced = {a % rank for a in (axes if isinstance(axes, (list, tuple)) else [axes])}
    keeps = len(node.args) > 2 and node.args[2]
    left = list(range(rank)) if keeps else [a for a in range(rank) if a not in reduced]
    return None if left[axis] in reduced else {node.args[0]: left[axis]}


def _norm(node: Node, axis: int) -> Axes | None:
    """A norm over the last axes."""
    return {node.args[0]: axis} if axis < len(_shape(node)) - len(node.args[1]) else None


def _transpose(node: Node, axis: int) -> Axes:
    return {node.args[0]: _permutation_of(node)[axis]}


def _permutation_of(node: torch.fx.Node) -> list[int]:
    """Return for each axis of a transposed tensor which axis of the operand it is."""
    rank = len(_shape(node))
    axes = list(range(rank))
    if node.target == _aten.permute.default:
        return [axis % rank for axis in node.args[1]]
    if node.target == _aten.numpy_T.default:
        return axes[::-1]
    first, second = (a % rank for a in node.args[1:3]) if node.target == _aten.transpose.int else (rank - 2, rank - 1)
    axes[first], axes[second] = axes[second], axes[first]
    return axes


def _unsqueeze(node: Node, axis: int) -> Axes | None:
    new = node.args[1] % len(_shape(node))
    return None if axis == new else {node.args[0]: axis - (axis > new)}


def _squeeze(node: Node, axis: int) -> Axes | None:
    """Only a squeeze of the one axis that has the size 1."""
    before, after = _shape(node.args[0]), _shape(node)
    axes = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    if len(before) != len(after) + 1 or len(axes) != 1:
        return None
    return {node.args[0]: axis + (axis >= axes[0] % len(before))}


def _select(node: Node, axis: int) -> Axes:
    return {node.args[0]: axis + (axis >= node.args[1] % len(_shape(node.args[0])))}


def _concatenation(node: Node, axis: int) -> Axes | None:
    along = node.args[1] if len(node.args) > 1 else 0
    return None if axis == along % len(_shape(node)) else dict.fromkeys(node.args[0], axis)


def _reshape(node: Node, axis: int) -> Axes | None:
    """The axis stays one of its own: as many elements come before it, and as many after it."""
    before, after = _shape(node.args[0]), _shape(node)
    for place, size in enumerate(before):
        sizes = [math.prod(before[:place]), size, math.prod(before[place + 1 :])]
        if is_same_shape(sizes, [math.prod(after[:axis]), after[axis], math.prod(after[axis + 1 :])]):
            return {node.args[0]: place}
    return None


def _experts(node: Node, axis: int) -> Axes | None:
    """x [..., M, K] and index [...], whose axes broadcast."""
    x, index = node.args[0], node.args[1] if node.target is gathered_quantized_matmul else node.args[2]
    place = axis - (len(_shape(node)) - 2)  # counted from the end of the axes of `index`
    if place >= 0:
        return None
    axes = {}
    for operand, rank in ((x, len(_shape(x)) - 2), (index, len(_shape(index)))):
        if rank >= -place and is_same_shape([_shape(operand)[rank + place]], [_shape(node)[axis]]):
            axes[operand] = rank + place
    return axes


_RESHAPES = (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default)
_COPIES = (
    _aten.to.dtype,
    _aten.to.dtype_layout,
    _aten._to_copy.default,
    _aten.contiguous.default,
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.dropout.default,
)
_PRODUCTS = (_aten.linear.default, quantized_matmul, int8_quantized_matmul, gathered_matmul, gathered_quantized_matmul)
_RULES: dict[Any, Rule] = {
    _aten.linear.default: _rows,
    quantized_matmul: _rows,
    int8_quantized_matmul: _rows,
    gathered_matmul: _experts,
    gathered_quantized_matmul: _experts,
    _aten.softmax.int: _other_axis(1),
    _aten._softmax.default: _other_axis(1),
    _aten.slice.Tensor: _other_axis(1),
    _aten.split.Tensor: _other_axis(2),
    _aten.split_with_sizes.default: _other_axis(2),
    _aten.chunk.default: _other_axis(2),
    _aten.topk.default: _other_axis(2, default=-1),
    operator.getitem: _same_axes,  # a result of an operator with several results
    _aten.mean.dim: _reduction,
    _aten.sum.dim_IntList: _reduction,
    _aten.amax.default: _reduction,
    _aten.layer_norm.default: _norm,
    _aten.rms_norm.default: _norm,
    _aten.transpose.int: _transpose,
    _aten.permute.default: _transpose,
    _aten.unsqueeze.default: _unsqueeze,
    _aten.squeeze.dim: _squeeze,
    _aten.squeeze.dims: _squeeze,
    _aten.select.int: _select,
    _aten.cat.default: _concatenation,
    **dict.fromkeys(_RESHAPES, _reshape),
    **dict.fromkeys(_COPIES, _same_axes),
}
