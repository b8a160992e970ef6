"""Runs a lowered graph node by node in eager torch, and records the values of the FX nodes inside its MLX delegates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import LoweredBackendModule
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Interpreter, Node

from ..inspect.pte import BACKEND


@dataclass
class DelegateCall:
    """One call of an MLX delegate: its inputs, its outputs, and the recorded values of its FX nodes."""

    inputs: list[Any]
    outputs: list[Any] = field(default_factory=list)
    values: dict[Node, Any] = field(default_factory=dict)


class EagerProgram:
    """A lowered graph in eager torch.

    It has mutable buffers of its own, which start with the contents of those of `program`. `delegates` are its MLX
    delegates, in the order of the graph.
    """

    def __init__(self, program: ExportedProgram):
        self.program = program
        self.delegates = mlx_delegates(program)
        self._states = {id(p): _State(p) for p in (program, *(d.original_module for d in self.delegates))}

    def call(self, inputs: Sequence[Any], keep: Callable[[Node], bool] = lambda node: True) -> list[DelegateCall]:
        """Run the graph once. The mutable buffers keep their new contents for the next call.

        Returns one DelegateCall for each of `delegates`, with the values of the FX nodes that `keep` accepts.
        """
        calls = []

        def run_delegate(module: LoweredBackendModule, *arguments: Any) -> list[Any]:
            if module.backend_id != BACKEND:
                return executorch_call_delegate(module, *arguments)
            call = DelegateCall(list(arguments))
            inner = _Run(module.original_module, call.values, keep, run_delegate)
            call.outputs = self._states[id(module.original_module)].run(inner, arguments)
            calls.append(call)
            return call.outputs

        with torch.no_grad():
            self._states[id(self.program)].run(_Run(self.program, {}, lambda node: False, run_delegate), inputs)
        return calls


def mlx_delegates(program: ExportedProgram) -> list[LoweredBackendModule]:
    """Return the MLX delegates of a lowered graph, in the order of the graph."""
    attributes = (_attribute(program, n) for n in program.graph.nodes if n.op == "get_attr")
    return [m for m in attributes if isinstance(m, LoweredBackendModule) and m.backend_id == BACKEND]


def _attribute(program: ExportedProgram, node: Node) -> Any:
    value = program.graph_module
    for part in node.target.split("."):
        value = getattr(value, part)
    return value


class _State:
    """The tensors of a graph: its parameters and constants, and copies of the buffers that it changes."""

    def __init__(self, program: ExportedProgram):
        self.signature = program.graph_signature
        self.tensors = {**program.constants, **program.state_dict}
        for name in self.signature.buffers_to_mutate.values():
            self.tensors[name] = self.tensors[name].detach().clone()

    def run(self, interpreter: Interpreter, inputs: Sequence[Any]) -> list[Any]:
        """Run the graph with `interpreter`. Stores the new contents of the buffers and returns the other outputs."""
        rest = iter(inputs)
        arguments = [
            next(rest) if spec.kind == InputKind.USER_INPUT else self.tensors.get(spec.target)
            for spec in self.signature.input_specs
        ]
        outputs = []
        for spec, value in zip(self.signature.output_specs, interpreter.run(*arguments), strict=True):
            if spec.kind == OutputKind.BUFFER_MUTATION:
                self.tensors[spec.target] = value.detach().clone()
            else:
                outputs.append(value)
        return outputs


class _Run(Interpreter):
    """Interprets a graph. Stores the values of the nodes that `keep` accepts. `run_delegate` runs the delegates."""

    def __init__(self, program: ExportedProgram, values: dict[Node, Any], keep: Callable, run_delegate: Callable):
        super().__init__(program.graph_module)
        self.extra_traceback = False
        self.values, self.keep, self.run_delegate = values, keep, run_delegate

    def run_node(self, node: Node) -> Any:
        value = super().run_node(node)
        if self.keep(node):
            self.values[node] = value
        return value

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is executorch_call_delegate:
            return self.run_delegate(*args)
        return super().call_function(target, args, kwargs)
