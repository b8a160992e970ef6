"""Composite operators: torch text over primitives, traced where it is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from .registry import Registry
from .slots import TensorSlot


def trace(
    registry: Registry, fake_mode: Any, text: Callable, arguments: Sequence[Any]
) -> tuple[GraphModule, list[TensorSlot]]:
    """The ATen graph of `text(*arguments)`, and the slots for its placeholders.

    Tensor slots are traced as fake tensors of their shape and dtype; everything else is
    passed to `text` as it is. Operators without a handler are decomposed on the way.
    """
    slots = [a for a in arguments if isinstance(a, TensorSlot)]

    def positional(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return text(*[next(rest) if isinstance(a, TensorSlot) else a for a in arguments])

    with fake_mode:
        fakes = [torch.empty(s.shape, dtype=s.dtype) for s in slots]
    table = {t: d for t, d in core_aten_decompositions().items() if registry.find(t) is None}
    with torch.no_grad():
        return make_fx(positional, decomposition_table=table)(*fakes), slots
