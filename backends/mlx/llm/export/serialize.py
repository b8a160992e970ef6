"""Turns the lowered methods of a language model into an ExecuTorch program."""

from __future__ import annotations

from executorch.exir import EdgeProgramManager, ExecutorchBackendConfig, ExecutorchProgramManager

from ...collector import paused_collector

PAGE = 16 << 10  # bytes of a page of memory of an Apple device, which maps whole pages of a file for its GPU


@paused_collector()
def serialize(lowered: EdgeProgramManager) -> ExecutorchProgramManager:
    """Return `lowered` as a program. Each constant begins at a page of the file."""
    return lowered.to_executorch(ExecutorchBackendConfig(segment_alignment=PAGE))
