"""The interface of a route, which compiles programs and runs them.

There are two routes. `exported.ExportedRoute` exports programs as a user does. `direct.DirectRoute` uses only the
compiler of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class CaptureRefused(Exception):
    """Raised if torch cannot capture the program, which is not a failure of this project."""


class NotDelegated(Exception):
    """Raised if the compiler declined a node of the program. The message is the reason."""


class Route(Protocol):
    """Compiled programs. The constructor takes a list of programs.

    If a program cannot be compiled, the constructor either adds its error to `failures` or raises it.
    """

    failures: dict[int, Exception]
    """The failures of programs that could not be compiled, by the index of the program in the list."""

    def run(self, extent: int) -> dict[int, Sequence[torch.Tensor] | Exception]:
        """Run the compiled programs, with `extent` as the size of every dynamic dimension.

        Returns the outputs of each program, or the error that its call raised, by the index of the program.
        """
