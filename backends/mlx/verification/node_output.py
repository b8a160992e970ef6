"""Runs a method of a `.pte` with an intermediate value as an additional output."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from torch.export import ExportedProgram
from torch.fx import Node

from ..builder.registry import aten_target
from ..file_regions import file_constants
from ..inspect.pte import read_pte
from .debug_program import Exposed, expose, serialize_program
from .interpret import mlx_delegates
from .load import load
from .locate import CannotLocate
from .origins import ProgramMismatch, trace_origins


class NodeOutput:
    """A method of the file `path` that also returns an intermediate value.

    The value is the first operand of the operator `target`, which the method calls exactly once. If that is the result
    of a branch, it is the first operand of the branch, which the branch may have changed. `edge` is the lowered
    graph of the method. The constructor writes a program with the additional output to the file `copy`, and copies the
    constants from file to file in small chunks. The caller deletes `copy` in the end.

    Raises CannotLocate if the method does not consist of exactly one MLX program, or if no instruction computes the
    operand.
    """

    def __init__(self, path: Path, method: str, edge: ExportedProgram, target: str, copy: Path):
        contents = read_pte(path)
        delegates = [d for d in contents.delegates if d.method == method]
        lowered = mlx_delegates(edge)
        if len(delegates) != 1 or len(lowered) != 1 or contents.calls_outside_mlx[method]:
            raise CannotLocate(f"method {method} does not consist of exactly one MLX program")
        graph, program = delegates[0].graph, lowered[0].original_module
        node = _first_operand(program, target)
        try:
            origin = next((o for o in reversed(trace_origins(program, graph)) if o.node is node), None)
        except ProgramMismatch as difference:
            raise CannotLocate(f"method {method} was not compiled from this graph: {difference}") from difference
        if origin is None:
            raise CannotLocate(f"no instruction computes the operand of {target}")
        val = node.meta["val"]
        exposed = Exposed(origin.index, origin.tid, val.dtype, tuple(val.shape), is_dynamic=False)
        with open(copy, "wb") as file:
            serialize_program(expose(graph, [exposed]), file_constants(path, contents)).write_to_file(file)
        self._run, self._order = load(copy), _argument_order(edge)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """Call the method. Returns the outputs of its MLX program, followed by the operand."""
        return self._run([inputs[i] for i in self._order])


def _first_operand(program: ExportedProgram, target: str) -> Node:
    calls = [n for n in program.graph.nodes if n.op == "call_function" and str(aten_target(n.target)) == target]
    if len(calls) != 1:
        raise CannotLocate(f"got {len(calls)} calls of {target} in the graph, expected 1")
    node = calls[0].args[0]
    while node.target is operator.getitem and node.args[0].target is torch.ops.higher_order.cond:
        node = node.args[0].args[3][0]
    return node


def _argument_order(edge: ExportedProgram) -> list[int]:
    """Return, for each argument of the delegate call, its index among the inputs of the method."""
    (call,) = (n for n in edge.graph.nodes if n.target is executorch_call_delegate)
    names = list(edge.graph_signature.user_inputs)
    return [names.index(argument.name) for argument in call.args[1:]]
