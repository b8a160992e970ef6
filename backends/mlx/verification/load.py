"""Loads a method of a `.pte` into ExecuTorch's runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from ..bindings import import_runtime


def load(pte: bytes | Path, method: str = "forward") -> Callable[[list[Any]], list[Any]]:
    """Load a method and return it as a function, which takes the list of inputs and returns the list of outputs.

    Mutable buffers keep their contents from call to call.
    """
    return load_methods(pte, [method])[method]


def load_methods(pte: bytes | Path, names: Iterable[str]) -> dict[str, Callable[[list[Any]], list[Any]]]:
    """Load several methods of one program, and return, by name, a function as `load` returns it.

    The methods share their mutable buffers.
    """
    program = import_runtime().get().load_program(pte)

    def function(name: str) -> Callable[[list[Any]], list[Any]]:
        method = program.load_method(name)

        def run(inputs: list[Any]) -> list[Any]:
            return [v.clone() if isinstance(v, torch.Tensor) else v for v in method.execute(inputs)]

        return run

    return {name: function(name) for name in names}
