"""Exports and lowers an op row, and checks that all of the program is delegated."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner, dynamic_steps
from executorch_mlx.builder.registry import REGISTRY
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.read import read_payload

from . import inferred_types
from .check import Failure
from .row import OpRow

_LIBRARY = torch.library.Library("mlxtest", "FRAGMENT")
_serial = itertools.count()


@dataclass(frozen=True)
class Lowered:
    """A lowered op row. `calls` has the inputs and the expected outputs of each call. `graphs` has the MLX programs."""

    pte: bytes
    calls: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]
    graphs: list[ir.MLXGraph]


def lower(row: OpRow) -> Lowered:
    """Export and lower an op row, and compute the expected outputs in eager torch.

    Raises `Failure` if a part of the program is not delegated, an expected IR node is missing, or a type is inferred
    wrongly.
    """
    module = row.module().eval()
    eager = copy.deepcopy(module)
    calls = []
    for call in range(row.calls):
        inputs = row.inputs(call)
        with torch.no_grad():
            expected = eager(*(t.clone() for t in inputs))
        if not expected:
            raise Failure("eager torch returned no tensor: there is nothing to compare")
        calls.append((inputs, tuple(t.detach().clone() for t in expected)))
    if row.traced:
        with _as_composite(module) as composite, lowered_targets() as targets:
            manager, partitioner = _lower(composite, row)
    else:
        with lowered_targets() as targets:
            manager, partitioner = _lower(module, row)
    _check_delegation(row, manager, partitioner)
    if row.target is not None and row.target not in targets:
        raise Failure(f"{row.target} was not lowered; got: {', '.join(sorted(targets))}")
    program = manager.to_executorch()
    graphs = [read_payload(bytes(d.data)) for d in program.executorch_program.backend_delegate_data]
    wrong_types = [problem for g in graphs for problem in inferred_types.problems(g)]
    if wrong_types:
        raise Failure("\n".join(wrong_types))
    nodes = {i.op.NAME for g in graphs for c in g.instruction_chains for i in c.instructions}
    nodes |= {r.instruction.op.NAME for g in graphs for r in g.replacements or ()}
    missing = set(row.nodes) - nodes
    if missing:
        raise Failure(f"IR nodes: got {', '.join(sorted(nodes))}, expected {', '.join(sorted(missing))} too")
    return Lowered(bytes(program.buffer), calls, graphs)


def _lower(module: torch.nn.Module, row: OpRow):
    inputs = row.inputs(0)
    with torch.no_grad(), dynamic_steps():
        program = torch.export.export(module, inputs, dynamic_shapes=row.dynamic_shapes())
    partitioner = MLXPartitioner(allow_extensions=row.allow_extensions)
    # The composite of a `traced` op row takes a list of tensors. ExecuTorch's verifier of the edge dialect mistakes the
    # first tensor for the list, and makes the first dimension of that tensor static.
    edge_verified = row.edge_verified and not row.traced
    config = EdgeCompileConfig(_check_ir_validity=edge_verified)
    manager = to_edge_transform_and_lower(program, partitioner=[partitioner], compile_config=config)
    return manager, partitioner


def host_calls(manager) -> list[str]:
    """Return the names of the operators that are not delegated: a name for each call of an operator."""
    targets = [
        getattr(n.target, "__name__", str(n.target))
        for n in manager.exported_program().graph.nodes
        if n.op == "call_function"
    ]
    return [t for t in targets if t not in ("executorch_call_delegate", "getitem")]


def delegate_calls(manager) -> int:
    return sum(
        n.op == "call_function" and getattr(n.target, "__name__", "") == "executorch_call_delegate"
        for n in manager.exported_program().graph.nodes
    )


def _check_delegation(row: OpRow, manager, partitioner: MLXPartitioner) -> None:
    undelegated, delegates = host_calls(manager), delegate_calls(manager)
    if row.host is not None:
        if not undelegated and delegates == 1:
            raise Failure(f"everything is delegated, but the op row has host={row.host!r}")
    elif undelegated or delegates != 1:
        raise Failure(
            f"got {delegates} delegate calls, expected 1; not delegated: {', '.join(undelegated) or 'nothing'}\n"
            f"{partitioner.explain()}"
        )


@contextmanager
def lowered_targets() -> Iterator[set[str]]:
    """A context manager. Yields a set. When a handler is called in the context, its target is added to the set."""
    called: set[str] = set()
    original = dict(REGISTRY.handlers)

    def recording(target, handler, *args, **kwargs):
        called.add(target_name(target))
        return handler(*args, **kwargs)

    for target, handler in original.items():
        REGISTRY.handlers[target] = functools.partial(recording, target, handler)
    try:
        yield called
    finally:
        REGISTRY.handlers.update(original)


def target_name(target) -> str:
    """Return the name of a target, as in `OpRow.target`."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target}"
    return f"{target.__module__.lstrip('_')}.{target.__name__}"


@contextmanager
def _as_composite(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A context manager. Yields a module that calls a composite operator, whose torch function is `module`."""
    name = f"composite_{next(_serial)}"
    _LIBRARY.define(f"{name}(Tensor[] tensors) -> Tensor[]")

    def kernel(tensors):
        return [t.clone() for t in module(*tensors)]

    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mlxtest::{name}", kernel, lib=_LIBRARY)
    operator = getattr(torch.ops.mlxtest, name).default
    REGISTRY.add(operator, lambda P, tensors: P.trace(lambda *t: list(module(*t)), *tensors))

    class Composite(torch.nn.Module):
        def forward(self, *tensors):
            return tuple(operator(list(tensors)))

    try:
        yield Composite()
    finally:
        del REGISTRY.handlers[operator]
