"""Replaces names in the Python modules of a model while the model runs.

Each family of models in `transformers` has its own copy of the functions for convolutions and recurrences, and torch
cannot export the copies for any number of tokens. A layer looks the functions up in its Python module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def replaced_names(model: torch.nn.Module, replacement: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Within the context, the Python modules of the classes of `model` have other values.

    `replacement(module, value)` returns the new value for a value in `module`, or None to leave it as it is.
    """
    replaced = []
    try:
        for module in {sys.modules[type(m).__module__] for m in model.modules()}:
            for name, value in list(vars(module).items()):
                new = replacement(module, value)
                if new is not None:
                    replaced.append((module, name, value))
                    setattr(module, name, new)
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
