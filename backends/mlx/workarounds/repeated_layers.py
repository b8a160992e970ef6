"""Traces only one of several equal decoder layers, because torch.export takes milliseconds for each operator.

Without it, the export of a model with 4 layers takes 1.2 times as long, and with 16 layers 1.7 times.

`trace_repeated` replaces the forward of the decoder layers during a trace. The first layer of a kind runs as usual, and
its calls of torch functions are recorded: it is a *template*. A later layer runs in *replay*: its Python code runs too,
but instead of calling a torch function, it gets the result that the template got. The replay checks each call: it must
be of the same function, with the same plain values, and with corresponding tensors. The same code with corresponding
calls computes the same graph, so the trace only records one node for the layer, a call of `mlx::repeated_layer`.
`expand` then replaces this node by a copy of the template's nodes.

A layer with other arguments, such as another mask, runs as usual and becomes another template. If a layer has the same
arguments but makes another call, `trace_repeated` gives up, and the model has to be traced as a whole. Nothing is
assumed about the code of the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from ..custom_ops.library import define

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Unrepeatable(Exception):
    """A layer differs from its template, or another part of the model uses an intermediate result of a template."""


@contextmanager
def trace_repeated(root: torch.nn.Module, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the context, a trace of `root` records repeated `layers` as calls of `mlx::repeated_layer`.

    The trace raises `Unrepeatable` if a layer makes other calls than its template, or runs twice.
    """
    tracer, layers = _Tracer(root), list(dict.fromkeys(layers))
    for layer in layers:
        layer.forward = functools.partial(tracer.run, layer, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # that of the class remains


def expand(program: ExportedProgram) -> None:
    """Replace the calls of `mlx::repeated_layer` by copies of the nodes of their templates, in place.

    Raises `Unrepeatable` if a node outside of a template uses a value that is not one of its results.
    """
    graph = program.graph
    repeats = graph.find_nodes(op="call_function", target=_REPEATED_LAYER)
    segments = {path: _segment(graph, path) for path in {node.args[0] for node in repeats}}
    constants = program.graph_signature.inputs_to_lifted_tensor_constants  # computed anew at every access
    for node in repeats:
        path, theirs, mine, results = node.args
        segment = segments[path]
        values = {_before(a, segment): _before(b, segment) for a, b in zip(theirs, mine, strict=True)}
        with graph.inserting_before(node):
            for traced in segment:
                if not _is_size(traced):
                    value = functools.partial(_value, values=values, constants=constants)
                    values[traced] = graph.node_copy(traced, value)
        _replace(node, [values[result] for result in results])
    for node in graph.find_nodes(op="call_function", target=_TEMPLATE_RESULTS):
        _replace(node, node.args[0])
    program.graph_module.recompile()


def _before(node: Node, segment: Collection[Node]) -> Node:
    """Return the node of a tensor that exists before the nodes in `segment` run.

    torch.export uses the last call that returned the tensor as its node. This may be a call in `segment` that returns
    its first operand, such as `copy_`, or a cast to the dtype that the tensor has.
    """
    while node in segment:
        operand = node.args[0]
        if not isinstance(operand, Node) or not _same_layout(operand.meta["val"], node.meta["val"]):
            raise Unrepeatable
        node = operand
    return node


def _value(node: Node, values: Mapping[Node, Node], constants: Collection[str]) -> Node:
    """Return the operand of a repeated layer that corresponds to `node`, an operand of the template.

    `constants` are the names of the placeholders of constants, which all layers share.
    """
    if node not in values and node.name not in constants and not _is_size(node):
        raise Unrepeatable
    return values.get(node, node)


def _is_size(node: Node) -> bool:
    """Whether `node` computes a size, which all layers of the graph share."""
    return isinstance(node.meta.get("val"), _SYMBOLIC)


def _replace(node: Node, results: Sequence[Node]) -> None:
    """Remove a call of one of the two operators, and use `results` instead of its results."""
    for item in list(node.users):
        item.replace_all_uses_with(results[item.args[1]])
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _segment(graph: torch.fx.Graph, path: str) -> dict[Node, None]:
    """Return the nodes that the layer at `path` of the exported module added to the graph, in order.

    Raises `Unrepeatable` if any other node uses one of them. Results of a layer are used through the two operators.
    """
    nodes = [n for n in graph.nodes if any(entry[0] == path for entry in n.meta.get("nn_module_stack", {}).values())]
    nodes = [n for n in nodes if all(each.target not in _OPERATORS for each in (n, *n.all_input_nodes))]
    inside = dict.fromkeys(nodes)
    for node in nodes:
        is_used_inside = all(user in inside or user.target in _OPERATORS for user in node.users)
        if node.op != "call_function" or not (_is_size(node) or is_used_inside):
            raise Unrepeatable
    return inside


# The two operators are in a graph only until `expand` removes them. They return new tensors like `results`, which are
# the results of a template.
#
# - `template_results` is called with the results of each template. The rest of the model gets the new tensors. In a
#   replay, the old tensors are therefore always those that correspond to results of the repeated layer.
# - `repeated_layer` stands for a layer. `template` is the path of the template, `theirs` are tensors that the template
#   uses, and `mine` the corresponding tensors that the layer uses.


def _new_tensors(*arguments: Any) -> list[torch.Tensor]:
    return [result.new_empty_strided(result.shape, result.stride()) for result in arguments[-1]]


def _not_expanded(*arguments: Any) -> list[torch.Tensor]:
    raise NotImplementedError("mlx: the layers of this program are not expanded")


_TEMPLATE_RESULTS = define("template_results(Tensor[] results) -> Tensor[]", _not_expanded, _new_tensors)
_REPEATED_LAYER = define(
    "repeated_layer(str template, Tensor[] theirs, Tensor[] mine, Tensor[] results) -> Tensor[]",
    _not_expanded,
    _new_tensors,
)
_OPERATORS = (_TEMPLATE_RESULTS, _REPEATED_LAYER)


class _Tracer:
    """Runs the layers of `root` in one trace."""

    def __init__(self, root: torch.nn.Module):
        self.root = root
        self.templates: list[_Template] = []
        self.ran: set[torch.nn.Module] = set()
        self.produced: set[int] = set()  # ids of the intermediate results of all templates, which keep them alive

    def run(self, layer: torch.nn.Module, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if layer in self.ran:  # `expand` could not tell the nodes of the two runs apart
            raise Unrepeatable
        self.ran.add(layer)
        for template in self.templates:
            if type(template.layer) is type(layer):
                replay = _Replay(template, self.produced)
                if replay.match(template.arguments, tree_flatten((args, kwargs))):
                    return replay.run(forward, args, kwargs)
        template = _Template(layer, self.root, (args, kwargs))
        with template:
            result = forward(*args, **kwargs)
        template.result = tree_flatten(result)
        self.templates.append(template)
        self.produced |= template.produced.keys()
        return template.new_result(torch.ops.mlx.template_results)


class _Template(TorchFunctionMode):
    """Records the calls of torch functions of `layer`, a module of `root`, while it runs on `arguments`.

    `external` are the tensors that exist before the layer runs, and `produced` those that its calls return, by id.
    """

    def __init__(self, layer: torch.nn.Module, root: torch.nn.Module, arguments: Any):
        super().__init__()
        self.layer = layer
        self.path = next(path for path, module in root.named_modules() if module is layer)
        self.arguments = tree_flatten(arguments)
        self.calls: list[tuple[Callable, tuple[list[Any], TreeSpec], Any]] = []
        self.produced: dict[int, torch.Tensor] = {}
        self.external = {id(t): t for ts in (root.parameters(), root.buffers(), self.arguments[0]) for t in ts}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        flat = tree_flatten((args, kwargs or {}))
        self.external |= {id(leaf): leaf for leaf in flat[0] if id(leaf) not in self.produced}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self.external:
                self.produced[id(leaf)] = leaf
        self.calls.append((function, flat, result))
        return result

    def new_result(self, function: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Any:
        """Return the result of the layer with other tensors: those that `function` returns for its tensors."""
        leaves, spec = self.result
        tensors = iter(function([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]))
        return tree_unflatten([next(tensors) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


class _Replay(TorchFunctionMode):
    """Gives a layer the results of the calls of `template`. Raises `Unrepeatable` if the layer makes other calls.

    `pairs` maps the id of a tensor that is external to the template to this tensor and the corresponding tensor of the
    layer. `produced` are the ids of the intermediate results of all templates.
    """

    def __init__(self, template: _Template, produced: set[int]):
        super().__init__()
        self.template, self.produced = template, produced
        self.pairs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.taken: dict[int, int] = {}  # id of a tensor of the layer → id of the corresponding tensor
        self.calls = iter(template.calls)
        self.is_different = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        expected, flat, result = next(self.calls, (None, None, None))
        self._require(expected is not None and function == expected)
        self._require(self.match(flat, tree_flatten((args, kwargs or {}))))
        return tree_map(self._mine, result)

    def run(self, forward: Callable, args: tuple, kwargs: dict) -> Any:
        """Run the layer, and return its result. `match` has compared its arguments with those of the template."""
        with self:
            result = forward(*args, **kwargs)
        self._require(not self.is_different and next(self.calls, None) is None)
        self._require(self.match(self.template.result, tree_flatten(result)))
        theirs, mine = map(list, zip(*self.pairs.values()))
        path = self.template.path
        return self.template.new_result(lambda results: torch.ops.mlx.repeated_layer(path, theirs, mine, results))

    def match(self, theirs: tuple[list[Any], TreeSpec], mine: tuple[list[Any], TreeSpec]) -> bool:
        """Whether `mine`, values of the layer, correspond to `theirs`. Both are flat."""
        return theirs[1] == mine[1] and all(map(self._same, theirs[0], mine[0]))

    def _require(self, condition: bool) -> None:
        if not condition:
            self.is_different = True  # the code of the layer may catch the exception
            raise Unrepeatable

    def _same(self, theirs: Any, mine: Any) -> bool:
        if type(theirs) is not type(mine):
            return False
        if isinstance(theirs, torch.Tensor):
            return self._correspond(theirs, mine)
        if isinstance(theirs, slice):
            parts = ((s.start, s.stop, s.step) for s in (theirs, mine))
            return all(map(self._same, *parts))
        if isinstance(theirs, torch.Size):
            return len(theirs) == len(mine) and all(map(self._same, theirs, mine))
        if isinstance(theirs, _SYMBOLIC):
            return theirs.node.expr == mine.node.expr
        if isinstance(theirs, _PLAIN):
            return repr(theirs) == repr(mine)
        return theirs is mine

    def _correspond(self, theirs: torch.Tensor, mine: torch.Tensor) -> bool:
        """Whether `mine` corresponds to `theirs`. Tensors that are external to the template are paired at first use."""
        if id(theirs) in self.template.produced:
            return mine is theirs
        if id(theirs) in self.pairs:
            return self.pairs[id(theirs)][1] is mine
        if id(mine) in self.taken or id(mine) in self.produced and mine is not theirs or not _same_layout(theirs, mine):
            return False
        self.pairs[id(theirs)], self.taken[id(mine)] = (theirs, mine), id(theirs)
        return True

    def _mine(self, theirs: Any) -> Any:
        """Return the value of the layer that corresponds to `theirs`, a part of a result of the template."""
        if not isinstance(theirs, torch.Tensor) or id(theirs) in self.template.produced:
            return theirs
        self._require(id(theirs) in self.pairs)
        return self.pairs[id(theirs)][1]


def _same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    def layout(x: torch.Tensor) -> tuple:
        sizes = [d.node.expr if isinstance(d, torch.SymInt) else d for d in (*x.shape, *x.stride(), x.storage_offset())]
        return x.dtype, x.device, x.layout, x.requires_grad, x.is_conj(), x.is_neg(), *sizes

    return layout(a) == layout(b)
