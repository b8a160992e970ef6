"""Finds the first departure: the first instruction whose value differs from eager torch by more than rounding."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from executorch.exir._serialize._cord import CordBuffer
from torch.export import ExportedProgram

from ..builder.dtypes import SCALAR_TYPES
from ..builder.registry import aten_target
from ..file_regions import file_constants
from ..inspect.pte import Delegate, read_pte
from ..inspect.render_text import format_instruction
from ..inspect.report import describe
from ..serialization.infer_types import infer_types
from .debug_program import Exposed, bound_extents, contiguous, expose, serialize_program
from .interpret import DelegateCall, EagerProgram
from .load import load
from .noise import RoundingNoise
from .origins import Origin, ProgramMismatch, trace_origins
from .report import Departure
from .rounding import compare

_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in SCALAR_TYPES}


class CannotLocate(Exception):
    """The first departure cannot be found. The message says why."""


def locate(
    edge: ExportedProgram,
    delegates: Sequence[Delegate],
    constants: Mapping[str, CordBuffer],
    calls: Sequence[Sequence[Any]],
    *,
    noisy_runs: int,
) -> Departure:
    """Find the first departure of a method in the first call that has one, and return it.

    - `edge`: the lowered graph of the method.
    - `delegates`: the MLX programs that the `.pte` holds for the method, in order.
    - `constants`: the constants in the `.pte`, by key.
    - `calls`: the inputs of each call, in order.
    - `noisy_runs`: the number of eager runs with rounding noise, from which the tolerances come.

    A copy of each MLX program returns the intermediate values. It gets the inputs that eager torch computes for this
    part of the graph. Raises CannotLocate if `edge` does not compile to the same MLX programs, or if none of their
    values departs.
    """
    eager = EagerProgram(edge)
    if len(eager.delegates) != len(delegates):
        raise CannotLocate(
            f"the method has {len(delegates)} MLX programs, the graph of the module compiles to {len(eager.delegates)}"
        )
    origins = [_origins(module.original_module, d) for module, d in zip(eager.delegates, delegates)]
    nodes = {origin.node for per_delegate in origins for origin in per_delegate}
    recorded = [eager.call(inputs, nodes.__contains__) for inputs in calls]
    noisy = []
    for seed in range(noisy_runs):
        program = EagerProgram(edge)
        with RoundingNoise(seed):
            noisy.append([program.call(inputs, nodes.__contains__) for inputs in calls])
    checks = [
        _DelegateCheck(delegate, found, constants, [call[i] for call in recorded])
        for i, (delegate, found) in enumerate(zip(delegates, origins))
    ]
    for number in range(len(calls)):
        for i, check in enumerate(checks):
            departure = check.departure(number, [run[number][i] for run in noisy])
            if departure is not None:
                return departure
    raise CannotLocate(
        "no value of an MLX program departs if the MLX program gets its inputs from eager torch: either the difference "
        "arises outside of MLX, or several differences within rounding add up to it"
    )


def locate_in_file(
    path: Path, method: str, edge: ExportedProgram, calls: Sequence[Sequence[Any]], *, noisy_runs: int = 2
) -> Departure:
    """The same as `locate`, for a method of the file `path`."""
    contents = read_pte(path)
    delegates = [d for d in contents.delegates if d.method == method]
    return locate(edge, delegates, file_constants(path, contents), calls, noisy_runs=noisy_runs)


def _origins(program: ExportedProgram, delegate: Delegate) -> list[Origin]:
    try:
        return trace_origins(program, delegate.graph)
    except ProgramMismatch as difference:
        message = f"MLX program {delegate.index} was not compiled from this graph: {difference}"
        raise CannotLocate(message) from difference


class _DelegateCheck:
    """Runs a copy of one MLX program that returns the intermediate values, and compares these with eager torch."""

    def __init__(
        self, delegate: Delegate, origins: list[Origin], constants: Mapping[str, CordBuffer], calls: list[DelegateCall]
    ):
        self.delegate, self.calls = delegate, calls
        results = {
            t.instruction.index: t.results
            for t in infer_types(delegate.graph)
            if t.instruction.chain == delegate.graph.main_chain_idx
        }
        self.exposed: list[tuple[Origin, Exposed]] = []
        for origin in origins:
            type_ = results.get(origin.index, {}).get(origin.tid)
            value = _exposed(origin, type_.dtype if type_ else None, [_eager_value(c, origin) for c in calls])
            self.exposed.append((origin, value))
        bounded = bound_extents(delegate.graph, [[*c.inputs, *c.outputs] for c in calls])
        graph = expose(bounded, [value for _, value in self.exposed])
        try:
            self.run = load(bytes(serialize_program(graph, constants)))
        except RuntimeError as error:
            raise _refusal(error) from error

    def departure(self, number: int, noisy: list[DelegateCall]) -> Departure | None:
        """Run call `number` and return the first departure in it, or None. Run the calls in their order."""
        call = self.calls[number]
        try:
            values = self.run(contiguous(call.inputs))[len(call.outputs) :]
        except RuntimeError as error:
            raise _refusal(error) from error
        for (origin, _), actual in zip(self.exposed, values, strict=True):
            comparison = compare(actual, _eager_value(call, origin), [_eager_value(run, origin) for run in noisy])
            if not comparison.ok:
                return _departure(self.delegate, origin, number, comparison)
        return None


def _refusal(error: RuntimeError) -> CannotLocate:
    return CannotLocate(f"the runtime refuses the program with intermediate values as outputs: {error}")


def _eager_value(call: DelegateCall, origin: Origin) -> torch.Tensor:
    """Return what eager torch computed for the tensor of `origin`."""
    value = call.values[origin.node]
    return value if origin.part is None else value[origin.part]


def _exposed(origin: Origin, runtime_dtype: str | None, values: list[torch.Tensor]) -> Exposed:
    shapes = [tuple(v.shape) for v in values]
    largest = tuple(map(max, zip(*shapes))) if shapes[0] else ()
    dtype = _BY_NAME.get(runtime_dtype, values[0].dtype)
    return Exposed(origin.index, origin.tid, dtype, largest, len(set(shapes)) > 1)


def _departure(delegate: Delegate, origin: Origin, call: int, comparison) -> Departure:
    graph = delegate.graph
    listed = describe(delegate, {})["chains"][graph.main_chain_idx][origin.index]
    op = graph.instruction_chains[graph.main_chain_idx].instructions[origin.index].op
    return Departure(
        call=call,
        method=delegate.method,
        delegate=delegate.index,
        index=origin.index,
        first_index=origin.first_index,
        op=op.NAME,
        listing=format_instruction(listed),
        node=origin.node.name,
        target=str(aten_target(origin.node.target)),
        source=_source(origin.node),
        comparison=comparison,
    )


def _source(node: torch.fx.Node) -> str:
    """Return the line of the model's source that an FX node comes from.

    This is the innermost stack frame outside of torch, or the innermost of all if every frame is in torch.
    """
    frames = re.findall(r'File "([^"]+)", line (\d+), in (\S+)\n\s*([^\n]*)', node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    if not own:
        return "unknown source line"
    file, line, function, code = own[-1]
    return f"{file}:{line}, in {function}: {code}"
