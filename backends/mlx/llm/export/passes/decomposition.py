"""Decomposes the operators of an exported program, in a fraction of the time that `run_decompositions` takes.

`run_decompositions` traces the whole graph twice. A language model repeats the same few calls in each of its layers.
`decompose` traces each different call once, alone, and inserts the result wherever the call occurs.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any

import torch
from executorch.exir.passes.remove_graph_asserts_pass import RemoveNonCoreAtenOpGraphAssertsPass
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.exported_program import (
    _override_composite_implicit_decomp,
    _split_decomp_table_to_cia_and_python_decomp,
)
from torch.export.graph_signature import ExportGraphSignature, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

_COND = torch.ops.higher_order.cond
_COPY = torch.ops.aten.copy_.default
_ASSERTION = torch.ops.aten._assert_tensor_metadata.default
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)


def decompose(program: ExportedProgram, table: Mapping[Any, Callable]) -> ExportedProgram:
    """Return what `program.run_decompositions(table)` returns, but without assertions about dtypes.

    Falls back to `run_decompositions` if the program has loops, sizes that depend on data, or an operator that changes
    a tensor in place, if the memory of this tensor is later read through another tensor.
    """
    try:
        return _Decomposition(program, table).run()
    except _Unsupported:
        program = program.run_decompositions(dict(table))
        RemoveNonCoreAtenOpGraphAssertsPass()(program.graph_module)  # in place
        return program


class _Unsupported(Exception):
    """The program has a node that cannot be decomposed alone."""


class _Decomposition:
    def __init__(self, program: ExportedProgram, table: Mapping[Any, Callable]):
        self.program = program
        self.composites, python_table = _split_decomp_table_to_cia_and_python_decomp(dict(table))
        self.traces: dict[Any, Graph] = {}
        memory = _Memory(program.graph_signature.inputs_to_buffers)
        self.copy = _Copy(program.graph_module, memory, python_table, self.traces)

    def run(self) -> ExportedProgram:
        nodes = self.program.graph.nodes
        fake_mode = detect_fake_mode([node.meta.get("val") for node in nodes if node.op == "placeholder"])
        if fake_mode is None:
            raise _Unsupported
        composites = _override_composite_implicit_decomp(self.composites)
        with fake_mode, torch.no_grad(), composites, enable_python_dispatcher():
            self.copy.insert_nodes()
        return self._result()

    def _result(self) -> ExportedProgram:
        """Return the program of the finished graph. New values of buffers come before the outputs."""
        program, signature, output = self.program, self.program.graph_signature, self.program.graph.output_node()
        graph, values = self.copy.graph, self.copy.values
        updated = {fqn: values[buffer] for buffer, fqn in self.copy.memory.updated_buffers().items()}
        results = [values[x] if isinstance(x, Node) else x for x in output.args[0]]
        others = [node for node in results if isinstance(node, Node)] + graph.find_nodes(op="placeholder")
        if len(set(updated.values()) - set(others)) < len(updated):
            raise _Unsupported  # a new value of a buffer is also an input, an output or the new value of another buffer
        specs = [OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(n.name), fqn) for fqn, n in updated.items()]
        for spec, result in zip(signature.output_specs, results, strict=True):
            if spec.kind != OutputKind.USER_OUTPUT:
                raise _Unsupported
            named = dataclasses.replace(spec.arg, name=result.name) if isinstance(result, Node) else spec.arg
            specs.append(dataclasses.replace(spec, arg=named))
        decomposed = ExportedProgram(
            root=self.copy.branches,
            graph=self.copy.finish((*updated.values(), *results)),
            graph_signature=ExportGraphSignature(list(signature.input_specs), specs),
            state_dict=dict(program.state_dict),
            range_constraints=dict(program.range_constraints),
            module_call_graph=program.module_call_graph,
            example_inputs=program.example_inputs,
            constants=program.constants,
        )
        decomposed.graph_module.meta.update(program.graph_module.meta)
        return decomposed


class _Copy:
    """A copy of a graph, with decomposed calls. Branches of `torch.cond` are copied in the same way.

    - `traces`: the decompositions of all calls so far.
    """

    def __init__(self, module: GraphModule, memory: _Memory, table: Mapping[Any, Callable], traces: dict[Any, Graph]):
        self.module, self.memory, self.table, self.traces = module, memory, table, traces
        self.graph = Graph()
        # Node of the module → its value: a node of `graph`, a number, or a list if the operator has several results.
        self.values: dict[Node, Any] = {}
        self.sizes: dict[Any, Node] = {}  # symbolic expression → the node of `graph` that computes it
        self.branches: dict[str, GraphModule] = {}

    def insert_nodes(self) -> None:
        """Insert all nodes but the output. Raises `_Unsupported`."""
        for node in self.module.graph.nodes:
            self.memory.read(node)
            if node.op == "placeholder":
                self.values[node] = self.graph.node_copy(node)
            elif node.op == "get_attr":
                self.values[node] = self._branch(node)
            elif node.op == "call_function" and node.target is not _ASSERTION:
                self.values[node] = self._call(node)
            elif node.op not in ("call_function", "output"):
                raise _Unsupported

    def finish(self, results: Sequence[Any]) -> Graph:
        """Insert the output, and return the graph."""
        self.graph.output(results).meta = dict(self.module.graph.output_node().meta)
        self.graph.eliminate_dead_code()
        return self.graph

    def _branch(self, node: Node) -> Node:
        """Insert a node for the copy of a branch."""
        branch = getattr(self.module, node.target)
        if not isinstance(branch, GraphModule):
            raise _Unsupported
        copy = _Copy(branch, _Memory({}), self.table, self.traces)
        copy.insert_nodes()
        results = map_arg(branch.graph.output_node().args[0], copy.values.__getitem__)
        self.branches[node.target] = GraphModule(copy.branches, copy.finish(results))
        return self.graph.node_copy(node)

    def _call(self, node: Node) -> Any:
        """Insert the decomposition of `node` and return its value."""
        if node.target is operator.getitem and isinstance(self.values[node.args[0]], list):
            return self.values[node.args[0]][node.args[1]]
        if isinstance(node.meta.get("val"), _SYMBOLIC):
            return self._size(node, self.values)
        if "unbacked_bindings" in node.meta:
            raise _Unsupported
        if node.target is _COND or node.target is operator.getitem and node.args[0].target is _COND:
            return self.graph.node_copy(node, self.values.__getitem__)
        if not isinstance(node.target, torch._ops.OpOverload):
            raise _Unsupported
        if not node.target._schema.is_mutable:
            return self._inline(node, node.target)
        changed, is_copy = self.memory.original(node.args[0]), node.target is _COPY
        value = self.values[node.args[1]] if is_copy else self._inline(node, _out_of_place(node.target))
        if not isinstance(value, Node) or _key(value.meta["val"]) != _key(changed.meta["val"]):
            raise _Unsupported
        self.memory.change(changed, node)
        self.values[changed] = value
        return value

    def _size(self, node: Node, values: Mapping[Node, Any]) -> Node:
        """Return the node that computes a size. It is a copy of `node`, unless another node computes the same size."""
        expression = node.meta["val"].node.expr
        if expression not in self.sizes:
            self.sizes[expression] = self.graph.node_copy(node, values.__getitem__)
        return self.sizes[expression]

    def _inline(self, node: Node, target: torch._ops.OpOverload) -> Any:
        """Insert the decomposition of a call of `target` with the operands of `node`. Returns its value."""
        leaves, spec = tree_flatten((node.args, node.kwargs))
        leaves = [self.values[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves]
        operands = list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, Node)))
        numbers = {operand: index for index, operand in enumerate(operands)}
        key = (
            target,
            spec,
            tuple(_key(operand.meta["val"]) for operand in operands),
            tuple((Node, numbers[leaf]) if isinstance(leaf, Node) else _key(leaf) for leaf in leaves),
        )
        if key not in self.traces:
            self.traces[key] = self._trace(target, leaves, spec, operands)
        values: dict[Node, Any] = {}
        unused = iter(operands)
        for traced in self.traces[key].nodes:
            if traced.op == "placeholder":
                values[traced] = next(unused)
            elif traced.op == "output":
                result = map_arg(traced.args[0], values.__getitem__)
            elif isinstance(traced.meta.get("val"), _SYMBOLIC):
                values[traced] = self._size(traced, values)
            else:
                values[traced] = self.graph.node_copy(traced, values.__getitem__)
                values[traced].meta = {**node.meta, "val": traced.meta["val"]}
        return list(result) if isinstance(result, (list, tuple)) else result

    def _trace(self, target: Any, leaves: Sequence[Any], spec: TreeSpec, operands: Sequence[Node]) -> Graph:
        """Return the graph of a call. Its placeholders stand for `operands`."""

        def call(*args: Any) -> Any:
            given = dict(zip(operands, args, strict=True))
            args, kwargs = tree_unflatten([given.get(x) if isinstance(x, Node) else x for x in leaves], spec)
            return target(*args, **kwargs)

        # Nodes with the same decomposition share a fake tensor. The tracer needs a different one for each operand.
        vals = [operand.meta["val"] for operand in operands]
        vals = [val.detach() if isinstance(val, torch.Tensor) else val for val in vals]
        graph = make_fx(call, decomposition_table=self.table)(*vals).graph
        inner = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        operators = [node.target for node in inner if not isinstance(node.meta.get("val"), _SYMBOLIC)]
        operators = [target for target in operators if target is not operator.getitem]
        if any(not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable for target in operators):
            raise _Unsupported
        if any("val" not in node.meta for node in inner):
            raise _Unsupported  # an operator without a result, such as an assertion about a size
        return graph


class _Memory:
    """Which nodes of a graph may share memory, while the nodes are visited in order."""

    def __init__(self, fqns: Mapping[str, str]):
        self._fqns = fqns  # name of a placeholder → name of a buffer
        self._owners: dict[Node, set[Any]] = {}  # node → what may own its memory: nodes, or results of nodes
        self._originals: dict[Node, Node] = {}  # call that changes a tensor → the node of this tensor
        self._stale: set[Node] = set()  # nodes whose memory may have been changed through another node

    def read(self, node: Node) -> None:
        """Record that `node` reads its operands. Raises `_Unsupported` if one of them is stale."""
        operands = node.all_input_nodes
        if not self._stale.isdisjoint(operands):
            raise _Unsupported
        if node.target is operator.getitem and self._owners[operands[0]] == {operands[0]}:
            self._owners[node] = {node.args}  # each result of an operator has memory of its own
        elif operands and _may_return_view(node.target):
            self._owners[node] = {node}.union(*(self._owners[operand] for operand in operands))
        else:
            self._owners[node] = {node}

    def original(self, node: Node) -> Node:
        """Return the first node of the tensor of `node`. Calls that change a tensor in place return the same tensor."""
        return self._originals.get(node, node)

    def change(self, node: Node, by: Node) -> None:
        """Record that the call `by` changes and returns the tensor of `node`.

        Raises `_Unsupported` if `node` may be an input of the graph, unless it is a buffer.
        """
        owners = self._owners[node]
        inputs = {owner for owner in owners if isinstance(owner, Node) and owner.op == "placeholder"}
        if inputs and not (inputs == {node} and node.name in self._fqns):
            raise _Unsupported
        self._originals[by] = node
        sharing = {other for other, theirs in self._owners.items() if not owners.isdisjoint(theirs)}
        self._stale |= sharing - {node, by}

    def updated_buffers(self) -> dict[Node, str]:
        """Return the placeholders of the buffers that changed, in their order, and the names of the buffers."""
        changed = set(self._originals.values())
        return {node: self._fqns[node.name] for node in self._owners if node in changed and node.name in self._fqns}


def _may_return_view(target: Any) -> bool:
    """Whether a result of `target` may share memory with an operand."""
    if not isinstance(target, torch._ops.OpOverload):
        return True
    is_composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return is_composite or any(result.alias_info is not None for result in target._schema.returns)


def _out_of_place(target: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """Return the operator that computes what `target` writes to its first operand."""
    schema = target._schema
    written = [i for i, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    packet = getattr(getattr(torch.ops, target.namespace), schema.name.split("::")[1].removesuffix("_"), None)
    found = getattr(packet, target._overloadname, None)
    if written != [0] or found is None or found._schema.is_mutable:
        raise _Unsupported
    return found


def _key(x: Any) -> Any:
    """Return a key of everything that a decomposition can depend on: the layout of a fake tensor, or a plain value."""
    if isinstance(x, torch.Tensor):
        sizes = (*x.shape, *x.stride(), x.storage_offset())
        return x.dtype, x.device, x.layout, x.is_conj(), x.is_neg(), *map(_key, sizes)
    if isinstance(x, _SYMBOLIC):
        return type(x), x.node.expr
    if isinstance(x, _PLAIN):
        return type(x), repr(x)
    raise _Unsupported
