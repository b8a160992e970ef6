"""Constant folding: a value that depends on no input becomes a constant, which torch computes at serialization."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .matcher import CASTS, is_call
from .registry import aten_target
from .slots import Space, TensorSlot

# The limit for the operands and the result of a folded node together. Larger values are computed in every run, unless
# the result replaces operands that are at least as large.
MAX_BYTES = 2**18


def fold(node: Node, value: Any, slot_of: Callable[[Node], Any], num_readers: Callable[[TensorSlot], int]) -> Any:
    """Return a constant if `node` can be folded, else `value`, the value to which `node` was lowered.

    A node can be folded if its operator is pure and all of its operands are known. In addition, operands and result
    together must take at most `MAX_BYTES`, or the node must be elementwise and its result must be no larger than the
    constants that it alone reads. `num_readers` returns how many nodes read a slot.

    A node without tensor operands (`arange`, `zeros`) keeps its instruction, which is smaller than the tensor. Its slot
    also gets a function that computes the tensor, as `value.data`. The users of the node can then be folded. If all
    users are folded, the instruction is dead and is dropped later.
    """
    if not isinstance(value, TensorSlot) or value.space != Space.TEMP or not _is_pure(node.target):
        return value
    operands = {n: slot_of(n) for n in node.all_input_nodes}
    if not all(_is_known(slot) for slot in operands.values()):
        return value
    result = node.meta["val"]
    shape = tuple(result.shape)
    size = _num_bytes(shape, result.dtype)
    sizes = {slot: _num_bytes(slot.shape, slot.dtype) for slot in operands.values()}
    data: Callable = functools.partial(_compute, node, operands)
    if size + sum(sizes.values()) <= MAX_BYTES:
        data = functools.cache(data)
    else:
        replaced = [s for s in sizes if s.space == Space.CONSTANT and num_readers(s) == 1]
        if not _is_elementwise(node) or size > sum(sizes[s] for s in replaced):
            return value
    if not operands:
        value.data = data
        return value
    return TensorSlot(result.dtype, shape, Space.CONSTANT, node.name, data)


def _is_pure(target: Any) -> bool:
    target = aten_target(target)
    return (
        isinstance(target, torch._ops.OpOverload)
        and target.namespace in ("aten", "dim_order_ops")
        and torch.Tag.nondeterministic_seeded not in target.tags
        and "empty" not in target._opname  # the elements of `empty` are undefined
    )


def _is_elementwise(node: Node) -> bool:
    return is_call(node, *CASTS) or torch.Tag.pointwise in aten_target(node.target).tags


def _is_known(slot: Any) -> bool:
    return isinstance(slot, TensorSlot) and slot.data is not None and slot.space != Space.BUFFER


def _num_bytes(shape: tuple, dtype: torch.dtype) -> float:
    """Return the size of a tensor in bytes; infinity for a dynamic shape."""
    if not all(isinstance(size, int) for size in shape):
        return math.inf
    return math.prod(shape) * dtype.itemsize


def _compute(node: Node, operands: dict[Node, TensorSlot]) -> torch.Tensor:
    with torch.no_grad():
        # `aten.view` accepts only some strides, and computed operands may have any: make them contiguous.
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: operands[n].data().detach().contiguous())
        return node.target(*args, **kwargs)
