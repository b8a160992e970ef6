"""Slots: the places of the values of an MLX program. `assemble` gives each slot its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch

from .registry import Unsupported


class Space(IntEnum):
    """The kind of a tensor slot. `assemble` numbers the tensor slots in this order: first all constants, and so on."""

    CONSTANT = 0
    INPUT = 1
    OUTPUT = 2
    BUFFER = 3
    TEMP = 4


@dataclass(eq=False)
class TensorSlot:
    """The place of a tensor.

    `shape` is None if the compiler does not know the shape. `data` is a function that returns the tensor of a constant,
    the initial value of a buffer, or the value of a temporary if the compiler knows that value. `data` is called only
    when the program is serialized, except for the scales and biases of packed weights. `constant_value` is the value of
    a constant that was a Python number in the source, else None. For a floating-point constant, it is the number before
    it was rounded to the dtype: ExecuTorch rounds numbers to the dtype of the other operand, but torch multiplies and
    divides by the number itself.

    `order` has the axes of an input or output as they lie in memory outside of MLX, outermost first. None is row-major.
    The slot of an output with an order holds the elements in this order.
    """

    dtype: torch.dtype
    shape: tuple[int | torch.SymInt, ...] | None = None
    space: Space = Space.TEMP
    name: str | None = None
    data: Callable[[], torch.Tensor] | None = None
    constant_value: bool | int | float | None = None
    order: tuple[int, ...] | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class ValueSlot:
    """The place of an int, float or bool on the host.

    `symbol` is the symbolic value that torch.export gave this number, or None if the handler of an FX node computes the
    number for itself. Arithmetic in Python raises `Unsupported`, so that a handler that needs a Python number declines
    the node.
    """

    kind: type = int
    symbol: torch.SymInt | torch.SymFloat | torch.SymBool | None = None

    def _refuse(self, *_: Any) -> Any:
        raise Unsupported("a number that is known only at run time is unsupported here; use a Python number")

    __index__ = __int__ = __float__ = __neg__ = __abs__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __pow__ = __rpow__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


Slot = TensorSlot | ValueSlot


@dataclass
class Interface:
    """The slots of an MLX program's inputs and outputs, in the order of the delegate call, and of its buffers."""

    inputs: list[Slot] = field(default_factory=list)
    outputs: list[Slot] = field(default_factory=list)
    buffers: list[TensorSlot] = field(default_factory=list)


# torch's symbolic numbers.
SYMBOLIC = (torch.SymBool, torch.SymInt, torch.SymFloat)


def slot_for(val: Any, **kwargs: Any) -> Any:
    """Return a new slot for `val`, the fake value of an FX node. `kwargs` are further attributes of a `TensorSlot`.

    Raises TypeError if `val` is neither a tensor nor a number.
    """
    if isinstance(val, torch.Tensor):
        return TensorSlot(dtype=val.dtype, shape=tuple(val.shape), **kwargs)
    for kind, symbolic in zip((bool, int, float), SYMBOLIC, strict=True):
        if isinstance(val, (symbolic, kind)):
            return ValueSlot(kind, symbol=val if isinstance(val, symbolic) else None)
    raise TypeError(f"slot: got a value of type {type(val).__name__}, expected a tensor or a number")
