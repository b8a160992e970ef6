"""Copies the graph of a program, and replaces the tensors of a dtype by pairs of tensors of another dtype."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

# The operators that move, repeat or negate elements: they do the same to both tensors of a pair.
MOVES = (
    aten.alias,
    aten.chunk,
    aten.clone,
    aten.contiguous,
    aten.detach,
    aten.diagonal,
    aten.expand,
    aten.expand_as,
    aten.flatten,
    aten.flip,
    aten.index,
    aten.index_select,
    aten.lift_fresh_copy,
    aten.mT,
    aten.movedim,
    aten.narrow,
    aten.neg,
    aten.permute,
    aten.repeat,
    aten.repeat_interleave,
    aten.reshape,
    aten.roll,
    aten.select,
    aten.slice,
    aten.split,
    aten.split_with_sizes,
    aten.squeeze,
    aten.t,
    aten.tile,
    aten.transpose,
    aten.unbind,
    aten.unflatten,
    aten.unsqueeze,
    aten.view,
    aten._unsafe_view,
    operator.getitem,
)


class NoRule(Exception):
    """The program has a tensor to replace where there is no rule for one."""


class Rewriter(ABC):
    """Copies the graph of a program node by node. `node` is the node that is being copied.

    A node that has a tensor to replace as operand or result is copied by the rule of its operator. The rule gets the
    rewriter as `P`, and the arguments of `node`, with a substitute for each tensor that is replaced. It calls `call`
    and `constant`, and returns a node or a substitute. The nodes in `kept` are copied as they are.
    """

    rules: ClassVar[dict[Any, Callable]]

    def __init__(self, program: ExportedProgram, kept: Collection[Node] = ()):
        self.program = program
        self.kept = kept
        self.graph = Graph()
        self.values: dict[Node, Any] = {}
        self.constants = dict(program.constants)
        self.fake_mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
        self.input_specs: list[InputSpec] = []

    @staticmethod
    @abstractmethod
    def is_replaced(value: torch.Tensor) -> bool:
        """Whether a tensor of the program is replaced."""

    @abstractmethod
    def split(self, name: str, tensor: torch.Tensor) -> Any:
        """Return the substitute of a parameter, buffer or constant."""

    @abstractmethod
    def checked(self, value: Any) -> Any:
        """Return the result of a rule, a node or a substitute, with the expected dtype.

        Raises `NoRule` if it has another shape than the result of `node`.
        """

    def rewrite(self) -> ExportedProgram:
        """Return the program with the new graph. Raises `NoRule`, with `node` as the node that has no rule."""
        specs = iter(self.program.graph_signature.input_specs)
        for node in self.program.graph.nodes:
            self.node = node
            if node.op == "placeholder":
                value = self._input(next(specs))
            elif node not in self.kept and has_replaced(node, self.is_replaced):
                value = self.replace()
            else:
                value = self._copy()
            self.values[node] = value
        return self._program()

    def replace(self) -> Any:
        """Return what replaces `node`, which has a tensor to replace as operand or result."""
        target = self.node.target
        if target is aten._assert_tensor_metadata.default:
            return None
        rule = self.rules.get(target._overloadpacket if isinstance(target, torch._ops.OpOverload) else target)
        if rule is None:
            raise NoRule
        args, kwargs = map_arg((self.node.args, self.node.kwargs), self.argument)
        value = rule(self, *args, **kwargs)
        return self.checked(value)

    def argument(self, node: Node) -> Any:
        """Return what a rule gets for the operand `node`."""
        return self.values[node]

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> Node:
        """Append a call of `target`, and return its node."""
        node = self.graph.call_function(target, args, kwargs)
        example_args, example_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            node.meta = self.node.meta | {"val": target(*example_args, **example_kwargs)}
        return node

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Return `x` itself if it has the dtype `dtype`, else a cast."""
        return x if x.meta["val"].dtype == dtype else self.call(aten.to.dtype, x, dtype)

    def constant(self, name: str, tensor: torch.Tensor) -> Node:
        """Add a constant, and return its placeholder, which becomes the first node."""
        name = f"{name}__{len(self.constants)}"
        self.constants[name] = tensor = tensor.clone(memory_format=torch.contiguous_format)
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            node = self.graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = self.fake_mode.from_tensor(tensor, static_shapes=True)
        self.input_specs.insert(0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name))
        return node

    def _copy(self) -> Node:
        return self.graph.node_copy(self.node, self.values.__getitem__)

    def _input(self, spec: InputSpec) -> Any:
        if self.node in self.kept or not has_replaced(self.node, self.is_replaced):
            self.input_specs.append(spec)
            return self._copy()
        if spec.kind == InputKind.USER_INPUT or spec.target in self.program.graph_signature.buffers_to_mutate.values():
            raise NoRule
        stored = self.program.constants if spec.target in self.program.constants else self.program.state_dict
        return self.split(spec.target, stored[spec.target].detach())

    def _program(self) -> ExportedProgram:
        signature = self.program.graph_signature
        placeholders = self.graph.find_nodes(op="placeholder")
        inputs = [
            InputSpec(s.kind, _renamed(s.arg, n), s.target, s.persistent)
            for s, n in zip(self.input_specs, placeholders, strict=True)
        ]
        results = self.graph.output_node().args[0]
        outputs = [
            type(s)(s.kind, _renamed(s.arg, n), s.target) for s, n in zip(signature.output_specs, results, strict=True)
        ]
        return ExportedProgram(
            root=self.program.graph_module,
            graph=self.graph,
            graph_signature=ExportGraphSignature(inputs, outputs),
            state_dict=self.program.state_dict,
            range_constraints=self.program.range_constraints,
            module_call_graph=self.program.module_call_graph,
            example_inputs=self.program.example_inputs,
            constants=self.constants,
            verifiers=self.program.verifiers,
        )


def has_replaced(node: Node, is_replaced: Callable[[torch.Tensor], bool]) -> bool:
    """Whether `node` has a tensor to replace as operand or result."""
    values = tree_leaves([n.meta.get("val") for n in (node, *node.all_input_nodes)])
    return any(isinstance(v, torch.Tensor) and is_replaced(v) for v in values)


def rule_decorator(rules: dict[Any, Callable]) -> Callable:
    """Return a decorator with targets as arguments, which adds the decorated function to `rules`."""

    def decorator(*targets: Any) -> Callable:
        def register(rule: Callable) -> Callable:
            rules.update(dict.fromkeys(targets, rule))
            return rule

        return register

    return decorator


def _renamed(argument: Any, node: Any) -> Any:
    return TensorArgument(node.name) if isinstance(argument, TensorArgument) else argument
