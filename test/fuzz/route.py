"""What a route from programs to running methods provides.

There are two: `exported.ExportedRoute` takes all of the real export, `direct.DirectRoute` only this project's compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class CaptureRefused(Exception):
    """torch cannot capture the program: not a failure of this project."""


class NotDelegated(Exception):
    """The compiler declined a node of the program, with the reason."""


class Route(Protocol):
    """Compiled programs. The constructor takes them as a list, and may raise what any one of them causes."""

    failures: dict[int, Exception]
    """Why programs did not compile, by their index in the list."""

    def run(self, extent: int) -> dict[int, Sequence[torch.Tensor] | Exception]:
        """The outputs of each compiled program by index, or the error of its call."""
