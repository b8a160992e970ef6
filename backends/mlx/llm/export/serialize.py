"""Turns the lowered methods of a language model into an ExecuTorch program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig, ExecutorchProgramManager
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves, tree_unflatten

from ...collector import paused_collector
from ...verification.interpret import mlx_delegates


PAGE = 16 << 10  # bytes of a page of memory of an Apple device, which maps whole pages of a file for its GPU


@paused_collector()
def serialize(lowered: EdgeProgramManager, *, portable: bool = False) -> ExecutorchProgramManager:
    """Do what `lowered.to_executorch()` does, in less time. With `portable`, each constant begins at a page of the file.

    The passes of `to_executorch` run each method with fake tensors several times. For a call of a delegate, they run
    the whole graph of the delegate, only to find out the shapes of its results, which the graph has already recorded.
    """
    programs = [d.original_module for name in lowered.methods for d in mlx_delegates(lowered.exported_program(name))]
    with _recorded_results(programs):
        return lowered.to_executorch(ExecutorchBackendConfig(segment_alignment=PAGE) if portable else None)


@contextmanager
def _recorded_results(programs: list[ExportedProgram]) -> Iterator[None]:
    """While active, the module of each of `programs` returns new fake tensors like the recorded results."""
    for program in programs:
        program.module = _recorded_module(program)
    try:
        yield
    finally:
        for program in programs:
            del program.module  # that of the class remains


def _recorded_module(program: ExportedProgram) -> Callable[[], Callable]:
    signature = program.graph_signature
    vals = {node.name: node.meta.get("val") for node in program.graph.nodes}
    inputs, outputs = ([vals.get(name) for name in names] for names in (signature.user_inputs, signature.user_outputs))

    def run(*args: Any) -> Any:
        leaves = tree_leaves(args)
        is_recorded = len(leaves) == len(inputs) and all(map(_same, leaves, inputs))
        if not is_recorded or not all(isinstance(x, FakeTensor) for x in outputs):
            return type(program).module(program)(*args)
        return tree_unflatten([_new(x) for x in outputs], program.call_spec.out_spec)

    return lambda: run


def _same(x: Any, recorded: Any) -> bool:
    """Whether `x` is a fake tensor of the mode of `recorded`, with the same dtype and sizes, also the dynamic ones."""
    if not isinstance(x, FakeTensor) or not isinstance(recorded, FakeTensor) or x.fake_mode is not recorded.fake_mode:
        return False
    return x.dtype == recorded.dtype and _sizes(x) == _sizes(recorded)


def _sizes(x: torch.Tensor) -> list[Any]:
    return [d.node.expr if isinstance(d, torch.SymInt) else d for d in x.shape]


def _new(x: FakeTensor) -> torch.Tensor:
    with x.fake_mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
