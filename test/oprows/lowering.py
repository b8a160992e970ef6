"""Row → .pte, with the checks that it was delegated as a whole."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.builder.registry import REGISTRY
from executorch_mlx.serialization import ir
from executorch_mlx.serialization.read import read_payload

from .check import Failure
from .row import Row

_LIBRARY = torch.library.Library("mlxtest", "FRAGMENT")
_serial = itertools.count()


@dataclass(frozen=True)
class Lowered:
    """A program, and what to call it with and expect of it, in order."""

    pte: bytes
    calls: list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]
    graphs: list[ir.MLXGraph]


def lower(row: Row) -> Lowered:
    """Export and lower; `Failure` if something stayed behind that should not have."""
    module = row.module().eval()
    eager = copy.deepcopy(module)
    calls = []
    for call in range(row.calls):
        inputs = row.inputs(call)
        with torch.no_grad():
            expected = eager(*(t.clone() for t in inputs))
        calls.append((inputs, tuple(t.detach().clone() for t in expected)))
    if row.traced:
        with _as_composite(module) as composite, lowered_targets() as seen:
            manager, partitioner = _lower(composite, row)
    else:
        with lowered_targets() as seen:
            manager, partitioner = _lower(module, row)
    _check_delegation(row, manager, partitioner)
    if row.target is not None and row.target not in seen:
        raise Failure(f"{row.target} was not lowered; these were: {', '.join(sorted(seen))}")
    program = manager.to_executorch()
    graphs = [
        read_payload(bytes(d.data)) for d in program.executorch_program.backend_delegate_data
    ]
    ops = {i.op.NAME for g in graphs for c in g.instruction_chains for i in c.instructions}
    missing = set(row.fused) - ops
    if missing:
        raise Failure(f"no {', '.join(sorted(missing))} among {', '.join(sorted(ops))}")
    return Lowered(bytes(program.buffer), calls, graphs)


def _lower(module: torch.nn.Module, row: Row):
    inputs = row.inputs(0)
    with torch.no_grad():
        program = torch.export.export(module, inputs, dynamic_shapes=row.dynamic_shapes())
    partitioner = MLXPartitioner(own_nodes=row.own_nodes)
    # The verifier mistakes the first tensor of an operator's list for the list, and so makes
    # a constant of its first dimension.
    verified = row.verified and not row.traced
    config = EdgeCompileConfig(_check_ir_validity=verified)
    manager = to_edge_transform_and_lower(
        program, partitioner=[partitioner], compile_config=config
    )
    return manager, partitioner


def host_calls(manager) -> list[str]:
    """What the host program calls besides the delegate."""
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


def _check_delegation(row: Row, manager, partitioner: MLXPartitioner) -> None:
    left, delegates = host_calls(manager), delegate_calls(manager)
    if row.host is not None:
        if not left and delegates == 1:
            raise Failure(f"all delegated, though the row says: {row.host}")
    elif left or delegates != 1:
        raise Failure(
            f"{delegates} delegate calls, left on the host: {', '.join(left) or 'nothing'}\n"
            f"{partitioner.explain()}"
        )


@contextmanager
def lowered_targets() -> Iterator[set[str]]:
    """Names of the registry's targets whose handlers were called."""
    seen: set[str] = set()
    original = dict(REGISTRY.handlers)

    def noted(target, handler, *args, **kwargs):
        seen.add(target_name(target))
        return handler(*args, **kwargs)

    for target, handler in original.items():
        REGISTRY.handlers[target] = functools.partial(noted, target, handler)
    try:
        yield seen
    finally:
        REGISTRY.handlers.update(original)


def target_name(target) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target}"
    return f"{target.__module__.lstrip('_')}.{target.__name__}"


@contextmanager
def _as_composite(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """A module that calls an operator whose text is `module`, lowered by being traced."""
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
