"""Gives positions to the modules that otherwise count the tokens in the cache, as in BART."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def given_positions(model: torch.nn.Module, positions: torch.Tensor) -> Iterator[None]:
    """Within the context, the modules of `model` that count the tokens in the cache look up `positions` `[S]` instead.

    The cache of a program cannot tell this number, because it is an input of the program.
    """

    def add_positions(_, arguments: tuple, options: dict) -> tuple[tuple, dict]:
        return arguments, options | {"position_ids": positions}

    with ExitStack() as hooks:
        for module in model.modules():
            if _counts_cached_tokens(type(module)):  # type: ignore[arg-type]
                hooks.enter_context(module.register_forward_pre_hook(add_positions, with_kwargs=True))
        yield


@functools.cache
def _counts_cached_tokens(kind: type[torch.nn.Module]) -> bool:
    return {"cache_length", "position_ids"} <= inspect.signature(kind.forward).parameters.keys()
