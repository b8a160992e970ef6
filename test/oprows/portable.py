"""Exports without replacements, so that the runtime runs the instructions that ExecuTorch's own MLX delegate runs."""

from __future__ import annotations

from unittest import mock

from executorch_mlx.builder.emitter import Emitter


def without_replacements():
    """A context manager: programs that are lowered inside the `with` block have no replacements."""
    return mock.patch.object(Emitter, "emit_replaceable", _emit)


def _emit(builder, extension, fields, emit):
    """Stands for `Emitter.emit_replaceable`."""
    return emit()
