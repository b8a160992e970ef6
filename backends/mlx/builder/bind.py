"""The arguments of a call, by the names of its schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .dtypes import SCALAR_TYPES
from .registry import Unsupported, aten_target

# Where a tensor lives and how its bytes lie is not the program's business, as long as they
# lie in the usual order.
_PLACEMENT = {"device", "pin_memory", "non_blocking", "layout", "memory_format", "dim_order"}
_CONTIGUOUS = (None, torch.contiguous_format, torch.preserve_format)


def bind_arguments(node: Node, slot_of: Callable[[Node], Any]) -> dict[str, Any]:
    """Schema name → slot, list of slots, or Python value; defaults filled in.

    Placement arguments are checked and dropped. A call of a Python operator binds its
    positions to `a`, `b`, ….
    """
    args = [_lower(a, slot_of) for a in node.args]
    kwargs = {k: _lower(a, slot_of) for k, a in node.kwargs.items()}
    target = aten_target(node.target)
    if isinstance(target, torch._ops.OpOverload):
        bound = {}
        for i, parameter in enumerate(target._schema.arguments):
            if i < len(args):
                bound[parameter.name] = args[i]
            elif parameter.name in kwargs:
                bound[parameter.name] = kwargs[parameter.name]
            else:
                bound[parameter.name] = _default(parameter)
    elif isinstance(target, torch._ops.HigherOrderOperator):
        return {"arguments": args, **kwargs}
    else:
        return dict(zip("abcdef", args)) | kwargs
    _check_placement(bound)
    return {name: value for name, value in bound.items() if name not in _PLACEMENT}


def _lower(argument: Any, slot_of: Callable[[Node], Any]) -> Any:
    """Nodes → slots; FX's immutable containers → plain ones."""
    if isinstance(argument, Node):
        return slot_of(argument)
    if isinstance(argument, (list, tuple)):
        return [_lower(a, slot_of) for a in argument]
    return argument


def _default(parameter: torch._C.Argument) -> Any:
    """A schema has its default dtypes as numbers, a graph has dtypes."""
    value = parameter.default_value
    if value is None or "ScalarType" not in str(parameter.real_type):
        return value
    for dtype, number in SCALAR_TYPES.items():
        if number == value:
            return dtype
    raise Unsupported(f"{parameter.name} is by default a dtype that MLX has not on every device")


def _check_placement(bound: dict[str, Any]) -> None:
    if bound.get("layout") not in (None, torch.strided):
        raise Unsupported(f"layout {bound['layout']}: only strided tensors lower")
    if bound.get("memory_format") not in _CONTIGUOUS:
        raise Unsupported(f"memory_format {bound['memory_format']}: only contiguous tensors lower")
    order = bound.get("dim_order")
    if order is not None and list(order) != sorted(order):
        raise Unsupported(f"dim_order {list(order)}: only contiguous tensors lower")
