"""Maps the arguments of a call to the parameter names in the schema of its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from .dtypes import SCALAR_TYPES
from .registry import Unsupported, aten_target

# Arguments for the device and the memory layout. Handlers do not get these arguments: the runtime chooses the device
# and the order in memory, and a `memory_format` or `dim_order` changes no value. Only the inputs and outputs of a
# program have the order in memory that torch.export recorded.
PLACEMENT = {"device", "pin_memory", "non_blocking", "layout", "memory_format", "dim_order"}


def bind_arguments(node: Node, slot_of: Callable[[Node], Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Missing arguments have their defaults.

    An argument is a slot, a list of slots or a Python value; `slot_of` returns the slot of an FX node. The arguments in
    `PLACEMENT` are left out. If the target has no schema, such as `operator.add`, the names are `a`, `b` and so on.
    If the target is a higher-order operator, such as `cond`, its positional arguments are a list named `arguments`.

    Raises `Unsupported` if `layout` is sparse, or if the default of a missing argument is a dtype that some MLX devices
    do not support.
    """
    args = [_to_slots(a, slot_of) for a in node.args]
    kwargs = {k: _to_slots(a, slot_of) for k, a in node.kwargs.items()}
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
    if bound.get("layout") not in (None, torch.strided):
        raise Unsupported(f"layout {bound['layout']}: only strided tensors are supported")
    return {name: value for name, value in bound.items() if name not in PLACEMENT}


def _to_slots(argument: Any, slot_of: Callable[[Node], Any]) -> Any:
    """Return `argument` with FX nodes replaced by slots, and FX's immutable containers by lists."""
    if isinstance(argument, Node):
        return slot_of(argument)
    if isinstance(argument, (list, tuple)):
        return [_to_slots(a, slot_of) for a in argument]
    return argument


def _default(parameter: torch._C.Argument) -> Any:
    """Return the default value of a parameter. A schema stores dtypes as numbers; handlers get torch dtypes.

    Raises `Unsupported` if the default is a dtype outside `SCALAR_TYPES`.
    """
    value = parameter.default_value
    if value is None or "ScalarType" not in str(parameter.real_type):
        return value
    for dtype, number in SCALAR_TYPES.items():
        if number == value:
            return dtype
    raise Unsupported(
        f"{parameter.name}: the default of this operator is a dtype that some MLX devices do not support; pass a dtype"
    )
