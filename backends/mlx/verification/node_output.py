"""A method of a `.pte` with one of its intermediate values as an additional output, without holding its constants."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from torch.export import ExportedProgram
from torch.fx import Node

from ..builder.registry import aten_target
from ..inspect.pte import read_pte
from .debug_program import Exposed, expose, program_of
from .file_constants import file_constants
from .interpret import EagerProgram
from .load import load
from .locate import CannotLocate
from .origins import NotTheSame, trace_origins


class NodeOutput:
    """Runs a method of the file `path` and also returns the first operand of its only call of the operator `target`.

    `edge` is the lowered graph of the method. `copy` is a file to write: the program with the additional output. Raises
    CannotLocate if the method is not one MLX program, or if the operand is not a value of it.
    """

    def __init__(self, path: Path, method: str, edge: ExportedProgram, target: str, copy: Path):
        contents = read_pte(path)
        delegates = [d for d in contents.delegates if d.method == method]
        lowered = EagerProgram(edge).delegates
        if len(delegates) != 1 or len(lowered) != 1 or contents.calls_outside_mlx[method]:
            raise CannotLocate(f"method {method} has more parts than one MLX program")
        graph, program = delegates[0].graph, lowered[0].original_module
        node = _first_operand(program, target)
        try:
            origin = next((o for o in reversed(trace_origins(program, graph)) if o.node is node), None)
        except NotTheSame as difference:
            raise CannotLocate(f"method {method} was not compiled from this graph: {difference}") from difference
        if origin is None:
            raise CannotLocate(f"no instruction computes the operand of {target}")
        val = node.meta["val"]
        exposed = Exposed(origin.index, origin.tid, val.dtype, tuple(val.shape), is_dynamic=False)
        with open(copy, "wb") as file:
            program_of(expose(graph, [exposed]), file_constants(path, contents)).write_to_file(file)
        self._run, self._order = load(copy), _argument_order(edge)

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the MLX program in a call with the inputs of the method, and the operand."""
        return self._run([inputs[i] for i in self._order])


def _first_operand(program: ExportedProgram, target: str) -> Node:
    calls = [n for n in program.graph.nodes if n.op == "call_function" and str(aten_target(n.target)) == target]
    if len(calls) != 1:
        raise CannotLocate(f"got {len(calls)} calls of {target} in the graph, expected 1")
    return calls[0].args[0]


def _argument_order(edge: ExportedProgram) -> list[int]:
    """For each argument of the delegate call, its place among the inputs of the method."""
    (call,) = (n for n in edge.graph.nodes if n.target is executorch_call_delegate)
    names = list(edge.graph_signature.user_inputs)
    return [names.index(argument.name) for argument in call.args[1:]]
