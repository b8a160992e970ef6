"""Gradients of random graphs: `GradientProgram` in eager torch, and `GradientRoute`, which exports them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
from executorch_mlx import MLXPartitioner
from executorch_mlx.training import value_and_grad
from loaded_method import LoadedMethod
from torch.nn.attention import SDPBackend, sdpa_kernel

from .exported import _quiet
from .programs import EXTENTS, Program
from .random_graphs import programs
from .route import CaptureRefused, NotDelegated


class _Module(torch.nn.Module):
    """The program, with its floating-point inputs as buffers, and a loss that weights each element of its outputs."""

    def __init__(self, program: Program, arguments: Sequence[torch.Tensor]):
        super().__init__()
        self.program, self.names = program, []
        for source, value in zip(program.inputs, arguments):
            if value.is_floating_point():
                self.names.append(source.name)
                self.register_buffer(source.name, torch.zeros_like(value))
        self._function = value_and_grad(self, lambda module, *rest: module.loss(*rest), self.names)

    def loss(self, *rest: torch.Tensor) -> torch.Tensor:
        rest = iter(rest)
        given = [getattr(self, i.name) if i.name in self.names else next(rest) for i in self.program.inputs]
        total = torch.zeros(())
        for y in self.program.function()(*given):
            if y.is_floating_point():
                total = total + (y.float() * torch.arange(y.numel()).reshape(y.shape).cos()).sum()
        return total

    def forward(self, *arguments: torch.Tensor):
        own = {i.name: a for i, a in zip(self.program.inputs, arguments) if i.name in self.names}
        rest = [a for i, a in zip(self.program.inputs, arguments) if i.name not in self.names]
        value, gradients = self._function(*rest, parameters=own)
        return value, *gradients.values()


class GradientProgram(Program):
    """The loss and the gradients of a program, at the extent EXTENTS[0]."""

    @property
    def extents(self) -> tuple[int, ...]:
        return EXTENTS[:1]

    def module(self) -> _Module:
        if not any(i.dtype.is_floating_point for i in self.inputs):
            raise ValueError("the program has no floating-point input")
        return _Module(self, self.arguments(EXTENTS[0]))

    def run(self, extent: int) -> tuple[torch.Tensor, ...]:
        with sdpa_kernel(SDPBackend.MATH):  # as in the export; its gradient has no operator of its own
            return self.module()(*self.arguments(extent))

    def check_eager(self) -> None:
        results = self.run(EXTENTS[0])
        if not all(y.isfinite().all() for y in results) or all((g == 0).all() for g in results[1:]):
            raise ValueError("the loss or a gradient is not finite, or all gradients are zero")


class GradientRoute:
    """Exports each program by itself. See `route.Route`."""

    def __init__(self, programs: Sequence[GradientProgram]):
        self.failures: dict[int, Exception] = {}
        self._methods = {}
        for index, program in enumerate(programs):
            try:
                self._methods[index] = program, _lowered(program)
            except Exception as failure:
                self.failures[index] = failure

    def run(self, extent: int):
        return {
            index: [y.clone() for y in method.execute(list(program.arguments(extent)))]
            for index, (program, method) in self._methods.items()
        }


def _lowered(program: GradientProgram) -> LoadedMethod:
    with _quiet():
        try:
            exported = torch.export.export(program.module(), program.arguments(EXTENTS[0]))
        except Exception as error:
            raise CaptureRefused(f"{type(error).__name__}: {error}") from error
        partitioner = MLXPartitioner(allow_extensions=True)
        config = EdgeCompileConfig(_check_ir_validity=False)
        lowered = to_edge_transform_and_lower(exported, partitioner=[partitioner], compile_config=config)
        if refused := partitioner.explain().refused:
            raise NotDelegated(f"{refused[0].target}: {refused[0].reason}")
        return LoadedMethod(bytes(lowered.to_executorch().buffer))


def gradient_programs():
    """A strategy for random graphs whose gradients are compared."""

    def with_gradients(program: Program) -> GradientProgram:
        return GradientProgram(**{field.name: getattr(program, field.name) for field in fields(Program)})

    return programs(has_gradients=True).map(with_gradients)
