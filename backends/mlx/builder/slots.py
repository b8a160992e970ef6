"""Slots: where a value of a program lives, before it has a number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch


class Space(IntEnum):
    """Tensor ids run over these spaces in this order."""

    CONSTANT = 0
    INPUT = 1
    OUTPUT = 2
    BUFFER = 3
    TEMP = 4


@dataclass(eq=False)
class TensorSlot:
    """A tensor. `shape` and `dtype` are what the compiler knows of it; `shape` may be None."""

    dtype: torch.dtype
    shape: tuple[int | torch.SymInt, ...] | None = None
    space: Space = Space.TEMP
    name: str | None = None
    # Constants and buffers: the data, asked for only when the program is serialized.
    data: Callable[[], torch.Tensor] | None = None
    # What a 0-d constant of the source text is: a dry run may look at it.
    number: bool | int | float | None = None

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class ValueSlot:
    """An int, float or bool on the host."""

    kind: type = int
    is_input: bool = False


Slot = TensorSlot | ValueSlot


def slot_for(val: Any, **kwargs: Any) -> Slot:
    """A fresh slot for the fake value of a node."""
    if isinstance(val, torch.Tensor):
        return TensorSlot(dtype=val.dtype, shape=tuple(val.shape), **kwargs)
    if isinstance(val, (torch.SymBool, bool)):
        return ValueSlot(bool)
    if isinstance(val, (torch.SymInt, int)):
        return ValueSlot(int)
    if isinstance(val, (torch.SymFloat, float)):
        return ValueSlot(float)
    raise TypeError(f"slot: a value of type {type(val).__name__} has no slot")
