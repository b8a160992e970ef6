"""The graph of a program with complex tensors, copied with pairs of real tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ...extents import is_same_shape


@dataclass(frozen=True)
class Pair:
    """A complex tensor: the nodes of its real and its imaginary part, or two numbers."""

    real: Any
    imag: Any


class NoRule(Exception):
    """The program has a complex tensor where there is no rule for one."""


def is_complex(value: Any) -> bool:
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)


class Rewriter:
    """Copies the graph of a program node by node. `node` is the node that is being copied.

    `rules` has a function for each operator of complex tensors. The function gets the rewriter as `P`, and the
    arguments of `node`, with a `Pair` for each complex tensor. It calls the public methods, and returns a node, a
    `Pair` or None.
    """

    def __init__(self, program: ExportedProgram, rules: dict[Any, Callable]):
        self.program = program
        self.rules = rules
        self.graph = Graph()
        self.values: dict[Node, Node | Pair | None] = {}
        self.constants = dict(program.constants)
        self.fake_mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
        self.input_specs: list[InputSpec] = []

    def rewrite(self) -> ExportedProgram:
        specs = iter(self.program.graph_signature.input_specs)
        for self.node in self.program.graph.nodes:
            if self.node.op == "placeholder":
                value = self._input(next(specs))
            elif self._computes_with_complex_tensors():
                value = self._apply_rule()
            else:
                value = self._copy()
            self.values[self.node] = value
        return self._program()

    def call(self, target: Callable, *args: Any, **kwargs: Any) -> Node:
        """Append a call of `target`, and return its node."""
        node = self.graph.call_function(target, args, kwargs)
        example_args, example_kwargs = map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta = self.node.meta | {"val": target(*example_args, **example_kwargs)}
        return node

    def constant(self, name: str, tensor: torch.Tensor) -> Node:
        """Add a constant, and return its placeholder, which becomes the first node."""
        name = f"{name}__{len(self.constants)}"
        self.constants[name] = tensor = tensor.clone(memory_format=torch.contiguous_format)
        with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
            node = self.graph.placeholder(name.replace(".", "_"))
        node.meta["val"] = self.fake_mode.from_tensor(tensor, static_shapes=True)
        self.input_specs.insert(0, InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(node.name), name))
        return node

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """Return `x` with this dtype."""
        return x if x.meta["val"].dtype == dtype else self.call(torch.ops.aten.to.dtype, x, dtype)

    def _copy(self) -> Node:
        return self.graph.node_copy(self.node, self.values.__getitem__)

    def _input(self, spec: InputSpec) -> Node | Pair:
        if not is_complex(self.node.meta.get("val")):
            self.input_specs.append(spec)
            return self._copy()
        if spec.kind == InputKind.USER_INPUT or spec.target in self.program.graph_signature.buffers_to_mutate.values():
            raise NoRule
        stored = self.program.constants if spec.target in self.program.constants else self.program.state_dict
        tensor = stored[spec.target].detach()
        real, imag = (self.constant(f"{spec.target}_{part}", getattr(tensor, part)) for part in ("real", "imag"))
        return Pair(real, imag)

    def _computes_with_complex_tensors(self) -> bool:
        operands = (self.values[n] for n in self.node.all_input_nodes)
        return is_complex(self.node.meta.get("val")) or any(isinstance(v, Pair) for v in operands)

    def _apply_rule(self) -> Node | Pair | None:
        target = self.node.target
        rule = self.rules.get(target._overloadpacket if isinstance(target, torch._ops.OpOverload) else target)
        if rule is None:
            raise NoRule
        args, kwargs = map_arg((self.node.args, self.node.kwargs), self.values.__getitem__)
        value = rule(self, *args, **kwargs)
        if isinstance(value, Pair):
            return Pair(self._checked(value.real), self._checked(value.imag))
        return value if value is None else self._checked(value)

    def _checked(self, part: Node) -> Node:
        """Return a part of the result of `node`, cast to its dtype. Raises `NoRule` if the part has another shape."""
        expected = self.node.meta["val"]
        if not isinstance(expected, torch.Tensor):  # a list of tensors, or a size
            return part
        if not is_same_shape(part.meta["val"].shape, expected.shape):
            raise NoRule
        return self.cast(part, expected.dtype.to_real())

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


def _renamed(argument: Any, node: Any) -> Any:
    return TensorArgument(node.name) if isinstance(argument, TensorArgument) else argument
