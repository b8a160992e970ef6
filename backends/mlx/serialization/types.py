"""Shapes and dtypes of tensors, as far as they are known before a program runs.

An extent that is known only at run time is None. An unknown shape or dtype is None as well.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from . import ir
from .listing import unwrap_operand

# ExecuTorch's ScalarType -> (MLX's name, bytes per element)
DTYPES = {
    0: ("uint8", 1),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("int64", 8),
    5: ("float16", 2),
    6: ("float32", 4),
    7: ("float64", 8),
    11: ("bool", 1),
    15: ("bfloat16", 2),
    27: ("uint16", 2),
    28: ("uint32", 4),
    29: ("uint64", 8),
}
ITEMSIZE = dict(DTYPES.values())
FLOATS = {"float16", "bfloat16", "float32", "float64"}
_PROMOTION_ORDER = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
]

Shape = tuple[int | None, ...]


class Type(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: Shape | None = None
    dtype: str | None = None

    @property
    def nbytes(self) -> int | None:
        """The size of the tensor in bytes, or None if a part of the type is unknown."""
        if self.shape is None or self.dtype is None or None in self.shape:
            return None
        return math.prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ", ".join("?" if d is None else str(d) for d in self.shape)
        return f"{self.dtype or '?'}[{dims}]"


class Unknown(Exception):
    """Raised by a rule that needs a shape or number that is unknown."""


class Env:
    """The types of the tensor slots and the numbers in the value slots, at one point of a program."""

    def __init__(self, types: dict, values: dict[int, int | None]):
        self.types = types
        self.values = values

    def type(self, tid: int) -> Type:
        return self.types.get(tid, Type())

    def shape(self, tid: ir.Tid) -> Shape:
        """Return the shape of a tensor slot; its dynamic extents are None. Raises Unknown if the rank is unknown."""
        shape = self.type(tid.idx).shape
        if shape is None:
            raise Unknown
        return shape

    def dtype(self, tid: ir.Tid) -> str | None:
        return self.type(tid.idx).dtype

    def value(self, x) -> int | None:
        """Return the integer that an operand holds, or None if that integer is unknown."""
        x = unwrap_operand(x)
        return self.values.get(x.idx) if isinstance(x, ir.Vid) else x if isinstance(x, int) else None

    def is_tensor(self, x) -> bool:
        """Whether an operand is a tensor slot."""
        return isinstance(x, ir.Tid)

    def is_constant(self, slot) -> bool:
        """Whether a tensor slot is a constant, which no instruction of the chain may write."""
        return False

    def known_value(self, slot) -> int | None:
        """Return the integer in a tensor slot of one element, or None if it is unknown."""
        return None

    def is_guarded(self, slot) -> bool:
        """Whether a tensor slot of divisors is a constant, or chosen so that it has no 0."""
        return self.is_constant(slot)

    def is_contiguous(self, slot) -> bool:
        """Whether the elements of a tensor slot certainly lie in memory in their order, without gaps."""
        return True

    def may_be_empty(self, extent) -> bool:
        """Whether an extent, a number or a value slot, is 0 or known to be possibly 0."""
        return self.value(extent) == 0

    def same_extents(self, a, b, except_axis: int | None = None) -> bool:
        """Whether two tensor slots of one rank may be taken to have the same extents, except on one axis."""
        pairs = zip(self.shape(a), self.shape(b), strict=True)
        return all(x == y or None in (x, y) for i, (x, y) in enumerate(pairs) if i != except_axis)


def dtype_name(scalar_type: int) -> str | None:
    return DTYPES.get(scalar_type, (None, 0))[0]


def promote(*dtypes: str | None) -> str | None:
    """Return the dtype to which MLX promotes operands of `dtypes`, or None if a dtype is unknown."""
    return None if None in dtypes else functools.reduce(_promote_two, dtypes)


def _promote_two(a: str, b: str) -> str:
    if a == b:
        return a
    a, b = sorted((a, b), key=_PROMOTION_ORDER.index)
    if b in FLOATS:
        return "float32" if (a, b) == ("float16", "bfloat16") else b
    if a == "bool" or a.startswith("u") == b.startswith("u"):
        return b
    # A signed and an unsigned integer become a signed one that holds both, and float32 if there is none.
    signed, unsigned = (b, a) if a.startswith("u") else (a, b)
    bits = max(8 * ITEMSIZE[signed], 16 * ITEMSIZE[unsigned])
    return f"int{bits}" if bits <= 64 else "float32"


def at_least_float(dtype: str | None) -> str | None:
    """Return `dtype` if it is floating-point or None, else float32."""
    return dtype if dtype is None or dtype in FLOATS else "float32"


def broadcast(*shapes: Shape) -> Shape:
    """Return the shape to which `shapes` broadcast. Raises Unknown if two extents contradict each other."""
    result = []
    for i in range(1, max(map(len, shapes)) + 1):
        dims = {s[-i] for s in shapes if len(s) >= i} - {1}
        numbers = {d for d in dims if isinstance(d, int)}
        if len(numbers) > 1:
            raise Unknown
        # Of two dynamic extents that differ, one may be 1.
        result.append(numbers.pop() if numbers else dims.pop() if len(dims) == 1 else None if dims else 1)
    return tuple(reversed(result))
