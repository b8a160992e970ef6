"""Composite operators: torch text over primitives, traced where it is lowered."""

from __future__ import annotations

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
    registry: Registry, fake_mode: Any, text: Callable, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[GraphModule, list[TensorSlot]]:
    """The ATen graph of `text(*args, **kwargs)`, and the slots for its placeholders.

    Tensor slots, also those within lists, are traced as fake tensors of their shape and dtype;
    everything else is passed to `text` as it is. Operators without a handler are decomposed on
    the way.
    """
    leaves, spec = tree_flatten((list(args), kwargs))
    slots = [leaf for leaf in leaves if isinstance(leaf, TensorSlot)]

    def positional(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        filled = [next(rest) if isinstance(leaf, TensorSlot) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        results = text(*args, **kwargs)
        return tuple(results) if isinstance(results, (list, tuple)) else results

    with fake_mode:
        fakes = [torch.empty(s.shape, dtype=s.dtype) for s in slots]
    table = {t: d for t, d in core_aten_decompositions().items() if registry.find(t) is None}
    # In fake mode too what `text` makes out of nothing is fake, and may have dynamic extents.
    with torch.no_grad(), fake_mode, _unchanged_extents(fake_mode):
        return make_fx(positional, decomposition_table=table)(*fakes), slots


@contextmanager
def _unchanged_extents(fake_mode: Any) -> Iterator[None]:
    """`Unsupported` if tracing would settle what a dynamic extent is: the program would be one
    for that extent only."""
    env = fake_mode.shape_env
    if env is None:
        yield
        return

    set_replacement = env._set_replacement

    def refuse(symbol: Any, value: Any, message: str) -> None:
        if message == "find":  # a chain of replacements that it has had is made shorter
            return set_replacement(symbol, value, message)
        raise Unsupported(f"its lowering would fix the dynamic extent {symbol} at {value}")

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
