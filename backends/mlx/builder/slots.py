"""Slots: the places of the values of an MLX program, and their types. `assemble` gives each slot its number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import sympy
import torch

from ..extents import expressions
from ..serialization import ir
from ..serialization.limits import MAX_RANK
from ..serialization.type_rules import rule_of
from ..serialization.types import Env, Shape, Type, Unknown
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


# The types of results, by the rules in `serialization/type_rules.py` ------------------------

# What a rule raises if it needs a shape that is unknown, or gets operands that do not fit.
_RULE_ERRORS = (Unknown, IndexError, ValueError, ArithmeticError)


def fields_of(op: type[ir.Op], fields: dict[str, Any]) -> SimpleNamespace:
    """Return the fields of an instruction as attributes, like those of an IR node. Absent fields have their default."""
    return SimpleNamespace(op=op, **{f.name: fields.get(f.name, f.default) for f in op.FIELDS})


class SlotTypes(Env):
    """The types of tensor slots, and the numbers in value slots.

    A dynamic extent is the symbolic expression of a `torch.SymInt`. An extent that has no expression is None.
    """

    def __init__(self) -> None:
        super().__init__({}, {})
        self._symbols: dict[sympy.Expr, torch.SymInt] = {}
        self._assumed: Shape | None = None  # the shape of an operand whose rank is unknown

    def shape(self, slot: TensorSlot) -> Shape:
        if slot.shape is not None:
            return tuple(self._expressions(slot.shape))
        shape = self.types[slot].shape if slot in self.types else self._assumed
        if shape is None:
            raise Unknown
        return shape

    def dtype(self, slot: TensorSlot) -> str:
        return str(slot.dtype).removeprefix("torch.")

    def value(self, x: Any) -> Any:
        if isinstance(x, ValueSlot):
            return self._expressions([x.symbol])[0] if isinstance(x.symbol, torch.SymInt) else None
        return x if isinstance(x, int) else None

    def is_tensor(self, x: Any) -> bool:
        return isinstance(x, TensorSlot)

    def result(self, op: type[ir.Op], fields: dict[str, Any]) -> TensorSlot:
        """Return a new slot for the only result of an instruction. Raises TypeError if the dtype is unknown."""
        shape, dtype = self._type(op, fields_of(op, fields))
        if dtype is None:
            raise TypeError(f"{op.__name__}: the dtype of the result is unknown; expected a rule in type_rules.py")
        out = TensorSlot(getattr(torch, dtype))
        if shape is not None:
            shape = tuple(self._extent(e) for e in shape)
            if None in shape:
                self.types[out] = Type(tuple(None if e is None else self._expressions([e])[0] for e in shape))
            else:
                out.shape = shape
        return out

    def set_extent(self, slot: TensorSlot, axis: int, extent: int | torch.SymInt) -> None:
        """Set the only extent of `slot` that has no expression."""
        slot.shape = tuple(extent if i == axis else self._extent(e) for i, e in enumerate(self.shape(slot)))

    def _type(self, op: type[ir.Op], n: SimpleNamespace) -> Type:
        """Return the type of the only result of an instruction. The dtype is known even if the shape is not."""
        rule = rule_of(op)
        if rule is None:
            return Type()
        try:
            return rule(n, self)
        except _RULE_ERRORS:
            pass
        for rank in range(MAX_RANK):  # no dtype depends on a rank: any that the rule takes will do
            self._assumed = (None,) * rank
            try:
                return Type(None, rule(n, self).dtype)
            except _RULE_ERRORS:
                pass
            finally:
                self._assumed = None
        return Type()

    def _expressions(self, shape: Iterable[int | torch.SymInt]) -> list:
        result = expressions(shape)
        self._symbols |= {e: s for e, s in zip(result, shape, strict=True) if not isinstance(e, int)}
        return result

    def _extent(self, e: Any) -> int | torch.SymInt | None:
        """Return the extent of an expression, or None if it is not the expression of a `torch.SymInt`."""
        if e is None or isinstance(e, int):
            return e
        if e.is_Integer:
            return int(e)
        if e not in self._symbols:
            if e.has(sympy.floor):  # torch has functions of its own for quotients
                return None
            env = next(iter(self._symbols.values())).node.shape_env
            self._symbols[e] = env.create_symintnode(e, hint=None)
        return self._symbols[e]
