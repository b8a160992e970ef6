"""Exports without replacements, so that the runtime runs the instructions that ExecuTorch's own MLX delegate runs."""

from __future__ import annotations

from unittest import mock

from executorch_mlx.builder import portable


class _Unrecorded(portable._Pass):
    def run(self):
        left = super().run()
        self.builder.replacements.clear()
        return left


def without_replacements():
    """A context manager: programs that are lowered inside the `with` block have no replacements."""
    return mock.patch.object(portable, "_Pass", _Unrecorded)
