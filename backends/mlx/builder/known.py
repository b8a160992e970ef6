"""Values that do not depend on any input: torch computes them when the program is serialized."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .registry import aten_target
from .slots import Space, TensorSlot

# Bytes of the operands and the result together. What is larger is computed at every run.
LIMIT = 2**18


def folded(node: Node, value: Any, slot_of: Callable[[Node], Any]) -> Any:
    """`value`, what `node` was lowered to, or a constant in its place if the operands are known.

    What is made from numbers alone (`arange`, `zeros`) stays an instruction; its slot then tells
    what it holds, and the instruction is dropped if nothing but folded ones reads it.
    """
    if not isinstance(value, TensorSlot) or value.space != Space.TEMP or not _is_pure(node.target):
        return value
    slots = {n: slot_of(n) for n in node.all_input_nodes}
    if not all(_is_known(slot) for slot in slots.values()):
        return value
    result = node.meta["val"]
    if not _bytes(tuple(result.shape), result.dtype) + sum(
        _bytes(s.shape, s.dtype) for s in slots.values()
    ) <= LIMIT:
        return value
    data = functools.cache(lambda: _evaluated(node, slots))
    if not slots:
        value.data = data
        return value
    return TensorSlot(result.dtype, tuple(result.shape), Space.CONSTANT, node.name, data)


def _is_pure(target: Any) -> bool:
    target = aten_target(target)
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "dim_order_ops")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and "empty" not in target._opname
    )


def _is_known(slot: Any) -> bool:
    return isinstance(slot, TensorSlot) and slot.data is not None and slot.space != Space.BUFFER


def _bytes(shape: tuple, dtype: torch.dtype) -> float:
    if not all(isinstance(extent, int) for extent in shape):
        return math.inf
    return math.prod(shape) * dtype.itemsize


def _evaluated(node: Node, slots: dict[Node, TensorSlot]) -> torch.Tensor:
    with torch.no_grad():
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: slots[n].data().detach())
        return node.target(*args, **kwargs)
