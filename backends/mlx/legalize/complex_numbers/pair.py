"""What replaces a complex tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A complex tensor: the nodes of its real and its imaginary part, or two numbers."""

    real: Any
    imag: Any
