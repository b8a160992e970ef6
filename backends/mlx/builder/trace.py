"""Traces a torch function to an ATen graph that the builder can lower."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from .registry import Registry, Unsupported
from .slots import TensorSlot


def trace(
    registry: Registry, fake_mode: Any, function: Callable, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[GraphModule, list[TensorSlot]]:
    """Returns the ATen graph of `function(*args, **kwargs)`, and the tensor slots that belong to its placeholders.

    `function` gets a fake tensor of the same shape and dtype in place of each tensor slot, also of those in lists. It
    gets all other arguments unchanged. Operators without a handler are decomposed. Raises `Unsupported` if tracing
    would specialize a dynamic dimension.
    """
    leaves, spec = tree_flatten((list(args), kwargs))
    slots = [leaf for leaf in leaves if isinstance(leaf, TensorSlot)]

    def call(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, TensorSlot) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        results = function(*args, **kwargs)
        return tuple(results) if isinstance(results, (list, tuple)) else results

    with fake_mode:
        fakes = [torch.empty(s.shape, dtype=s.dtype) for s in slots]
    table = {t: d for t, d in _decompositions().items() if registry.handler_for(t) is None}
    # `fake_mode` is active, so that the tensors that `function` creates are fake too and may have dynamic shapes.
    with torch.no_grad(), fake_mode, _no_specialization(fake_mode):
        return make_fx(call, decomposition_table=table)(*fakes), slots


@functools.cache
def _decompositions() -> dict[Any, Callable]:
    """Returns torch's decompositions. They are cached, because torch takes a tenth of a second to list them."""
    return dict(core_aten_decompositions().items())


@contextmanager
def _no_specialization(fake_mode: Any) -> Iterator[None]:
    """Raise `Unsupported` if tracing would specialize a dynamic dimension, that is, fix its size.

    A specialized program would be valid for that size only. If `Unsupported` is raised, the shape environment keeps
    none of the guards and axioms that tracing added.
    """
    env = fake_mode.shape_env
    if env is None:
        yield
        return

    set_replacement = env._set_replacement

    def refuse(symbol: Any, value: Any, message: str) -> None:
        if message == "find":  # shortens a chain of replacements that already exist
            return set_replacement(symbol, value, message)
        raise Unsupported(f"its lowering would specialize the dynamic dimension {symbol} to {value}")

    guards, axioms = len(env.guards), dict(env.axioms)
    env._set_replacement = refuse
    try:
        yield
    except Unsupported:
        del env.guards[guards:]
        env.axioms.clear()
        env.axioms.update(axioms)
        raise
    finally:
        del env._set_replacement
