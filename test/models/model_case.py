"""A test case of `test_models`: a model that is lowered, run, and compared with eager torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from executorch.exir import to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from interpreter import OFFICIAL, OURS, Program
from loaded_method import LoadedMethod
from oprows.lowering import delegate_calls, host_calls


@dataclass(frozen=True)
class Model:
    """A model, and what to expect of it.

    `make` returns the module and its inputs. `tolerance` bounds the largest difference, relative to the largest output.
    `delegates` is the number of delegate calls, and `host` names the calls that are not delegated. If there are
    `lengths`, the second dimension of the first input is dynamic, and the model also runs with each of these lengths.
    """

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
    """The outcome. `report` is from `explain()`.

    `errors` has the largest difference relative to the largest output, on this runtime and in the interpreter.
    """

    delegates: int
    host: list[str]
    errors: dict[str, float]
    report: str


def randomize(module: torch.nn.Module) -> None:
    """Set random weights of a scale at which every layer matters, and norms that are not the identity."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point() or "inv_freq" in name or "frequencies" in name:
            continue
        if tensor.ndim > 1:
            tensor.data.normal_(std=tensor[0].numel() ** -0.5)
        else:
            tensor.data.mul_(1 + 0.2 * torch.rand_like(tensor)).add_(0.1 * torch.rand_like(tensor))


def measure(model: Model) -> Result:
    """Export, lower and run a model, and compare it with eager torch."""
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
        if hasattr(module, "names"):  # an instance of transformers_zoo.OneResult, whose `forward` takes *inputs
            dynamic = (dynamic,)
    partitioner = MLXPartitioner()
    with torch.no_grad():
        expected = [results(module(*call)) for call in calls]
        exported = torch.export.export(module, inputs, dynamic_shapes=dynamic)
        manager = to_edge_transform_and_lower(exported, partitioner=[partitioner])
    host, delegates = host_calls(manager), delegate_calls(manager)
    pte = bytes(manager.to_executorch().buffer)
    runtimes = {
        "this runtime": LoadedMethod(pte).execute,
        "interpreter, as this runtime": partial(Program(pte, OURS).execute, "forward"),
        "interpreter, as ExecuTorch's own delegate": partial(Program(pte, OFFICIAL).execute, "forward"),
    }
    errors = {
        name: max(difference(results(tuple(execute(list(call)))), e) for call, e in zip(calls, expected))
        for name, execute in runtimes.items()
    }
    return Result(delegates, host, errors, str(partitioner.explain()))


def results(outputs) -> tuple[torch.Tensor, ...]:
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return tuple(t.clone() for t in outputs)


def resized(tokens: torch.Tensor, length: int) -> torch.Tensor:
    return tokens.repeat(1, -(-length // tokens.shape[1]))[:, :length].contiguous()


def difference(actual: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> float:
    """The largest difference in any output, relative to the largest number of that output."""
    assert [(a.shape, a.dtype) for a in actual] == [(e.shape, e.dtype) for e in expected]
    assert all(a.isfinite().all() and e.isfinite().all() for a, e in zip(actual, expected))
    return max(
        ((a.double() - e.double()).abs().max() / e.double().abs().max()).item() for a, e in zip(actual, expected)
    )
