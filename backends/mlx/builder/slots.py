"""Slots: the places of the values of an MLX program. `assemble` gives each slot its number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch


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
    when the program is serialized. `constant_value` is the value of a constant that was a Python number in the source,
    else None.
    """

    dtype: torch.dtype
    shape: tuple[int | torch.SymInt, ...] | None = None
    space: Space = Space.TEMP
    name: str | None = None
    data: Callable[[], torch.Tensor] | None = None
    constant_value: bool | int | float | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class ValueSlot:
    """The place of an int, float or bool on the host."""

    kind: type = int
    is_input: bool = False


Slot = TensorSlot | ValueSlot


def slot_for(val: Any, **kwargs: Any) -> Slot:
    """Returns a new slot for `val`, the fake value of an FX node. `kwargs` are further attributes of a `TensorSlot`.

    Raises TypeError if `val` is neither a tensor nor a number.
    """
    if isinstance(val, torch.Tensor):
        return TensorSlot(dtype=val.dtype, shape=tuple(val.shape), **kwargs)
    if isinstance(val, (torch.SymBool, bool)):
        return ValueSlot(bool)
    if isinstance(val, (torch.SymInt, int)):
        return ValueSlot(int)
    if isinstance(val, (torch.SymFloat, float)):
        return ValueSlot(float)
    raise TypeError(f"slot: got a value of type {type(val).__name__}, expected a tensor or a number")
