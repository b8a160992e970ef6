"""Loads a program into the real runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..loader import load_delegate


def load(pte: bytes | Path, method: str = "forward") -> Callable[[list[Any]], list[Any]]:
    """A method of a program, as a function from its inputs to its outputs. State lasts from call to call."""
    load_delegate()
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(pte)
    loaded = program.load_method(method)

    def run(inputs: list[Any], program: Any = program) -> list[Any]:  # a program has to outlive its methods
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in loaded.execute(inputs)]

    return run
