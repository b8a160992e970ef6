"""Gradients of a module in an exported program, beside those of eager torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.training import value_and_grad
from loaded_method import LoadedMethod
from oprows.lowering import delegate_calls, host_calls


class Gradients(torch.nn.Module):
    """Returns `loss(module, *args)` and its gradients."""

    def __init__(self, module: torch.nn.Module, loss: Callable, names=None):
        super().__init__()
        self.module = module
        self._function = value_and_grad(module, loss, names)

    def forward(self, *args):
        value, gradients = self._function(*args)
        return value, *gradients.values()


def lowered(module: torch.nn.Module, args, dynamic_shapes=None, **options):
    """Export and lower a module. Returns the bytes of its program, which has one delegate and no other node."""
    partitioner = MLXPartitioner(**options)
    exported = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
    config = EdgeCompileConfig(_check_ir_validity=False)
    manager = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
    assert (delegate_calls(manager), host_calls(manager)) == (1, []), str(partitioner.explain())
    return bytes(manager.to_executorch().buffer)


def run(module: torch.nn.Module, args, **options) -> list[torch.Tensor]:
    return [y.clone() for y in LoadedMethod(lowered(module, args, **options)).execute(list(args))]


def assert_close(actual, expected, tolerance: float) -> None:
    """Compare tensors. `tolerance` bounds the largest difference, relative to the largest element of the tensor."""
    for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert (a.shape, a.dtype) == (e.shape, e.dtype)
        largest = e.double().abs().max().item()
        assert (a.double() - e.double()).abs().max().item() <= tolerance * max(largest, 1e-3), f"tensor {index}"
