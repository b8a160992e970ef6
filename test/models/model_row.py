"""A row of the table of models: lowered, run by the real runtime, compared with eager torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from executorch_mlx import MLXPartitioner
from executorch_mlx.serialization.read import read_payload
from oprows.lowering import delegate_calls, host_calls


@dataclass(frozen=True)
class Model:
    """`make` gives the module and its inputs. `tolerance`: of the largest difference, relative to
    the largest output. `axis`: the one axis of the first input that is dynamic, if any; the model
    is then also run with `lengths` of it. `host`: what is left undelegated, by name."""

    name: str
    make: Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]
    tolerance: float = 1e-4
    dtype: torch.dtype = torch.float32
    delegates: int = 1
    host: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Result:
    delegates: int
    host: list[str]
    instructions: Counter
    error: float
    report: str


def randomize(module: torch.nn.Module) -> None:
    """Weights of a size that lets every layer count, and norms that are not the identity."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point() or "inv_freq" in name or "frequencies" in name:
            continue
        if tensor.ndim > 1:
            tensor.data.normal_(std=tensor[0].numel() ** -0.5)
        else:
            tensor.data.mul_(1 + 0.2 * torch.rand_like(tensor)).add_(0.1 * torch.rand_like(tensor))


def measure(model: Model) -> Result:
    """Export, lower, run and compare."""
    torch.manual_seed(0)
    module, inputs = model.make()
    module = module.eval().to(model.dtype)
    randomize(module)
    inputs = tuple(t.to(model.dtype) if t.is_floating_point() else t for t in inputs)
    calls = [inputs] + [(resized(inputs[0], n), *inputs[1:]) for n in model.lengths]
    dynamic = None
    if model.lengths:
        length = torch.export.Dim("length", min=2, max=max(*model.lengths, inputs[0].shape[1]))
        dynamic = ({1: length}, *({} for _ in inputs[1:]))
        if hasattr(module, "names"):
            dynamic = (dynamic,)  # of *inputs
    partitioner = MLXPartitioner()
    with torch.no_grad():
        expected = [results(module(*call)) for call in calls]
        exported = torch.export.export(module, inputs, dynamic_shapes=dynamic)
        manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    host, delegates = host_calls(manager), delegate_calls(manager)
    lowered = manager.to_executorch()
    program = Runtime.get().load_program(bytes(lowered.buffer))
    method = program.load_method("forward")
    actual = [results(tuple(method.execute(list(call)))) for call in calls]
    return Result(
        delegates,
        host,
        instructions(lowered),
        max(difference(a, e) for a, e in zip(actual, expected)),
        str(partitioner.explain()),
    )


def instructions(lowered) -> Counter:
    graphs = [read_payload(bytes(d.data)) for d in lowered.executorch_program.backend_delegate_data]
    return Counter(i.op.NAME for g in graphs for c in g.instruction_chains for i in c.instructions)


def results(found) -> tuple[torch.Tensor, ...]:
    found = (found,) if isinstance(found, torch.Tensor) else found
    return tuple(t.clone() for t in found)


def resized(tokens: torch.Tensor, length: int) -> torch.Tensor:
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length].contiguous()


def difference(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest of all outputs, relative to the largest number of that output."""
    assert [(a.shape, a.dtype) for a in actual] == [(e.shape, e.dtype) for e in expected]
    assert all(a.isfinite().all() and e.isfinite().all() for a, e in zip(actual, expected))
    return max(
        ((a.double() - e.double()).abs().max() / e.double().abs().max()).item()
        for a, e in zip(actual, expected)
    )
