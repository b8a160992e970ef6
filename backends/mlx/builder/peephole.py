"""Instructions that say again, or say in two steps, what one says: `simplified` looks at an
instruction and at those that made its operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..serialization import ir
from .dtypes import SCALAR_TYPES
from .slots import Space, TensorSlot

_VIEWS = (ir.ReshapeNode, ir.ExpandDimsNode, ir.SqueezeNode)


def simplified(
    made: dict[TensorSlot, Any], op: type[ir.Op], fields: dict[str, Any]
) -> TensorSlot | dict[str, Any]:
    """A slot that holds the result already, or the fields to emit.

    `made`: slot → the instruction that made it.
    """
    rule = _RULES.get(op)
    return fields if rule is None else rule(made, fields)


def _operand(made, x: TensorSlot, *ops: type[ir.Op]) -> dict[str, Any] | None:
    """The fields of what made `x`, if it is one of `ops` and its own operand is still the same:
    a buffer may have been written since."""
    source = made.get(x)
    if source is None or source.op not in ops or source.fields["x"].space == Space.BUFFER:
        return None
    return source.fields


def _transpose(made, fields):
    x, perm = fields["x"], list(fields["perm"])
    while inner := _operand(made, x, ir.TransposeNode):
        x, perm = inner["x"], [inner["perm"][axis] for axis in perm]
    if perm == list(range(len(perm))) and x.space != Space.BUFFER:
        return x
    return fields | {"x": x, "perm": perm}


def _reshape(made, fields):
    x, shape = fields["x"], tuple(fields["shape"])
    while inner := _operand(made, x, *_VIEWS):
        x = inner["x"]
    static = all(isinstance(extent, int) for extent in shape)
    if static and x.shape == shape and x.space != Space.BUFFER:
        return x
    return fields | {"x": x}


def _as_type(made, fields):
    """Casts fold into the last one, unless one before it may have lost something."""
    x, target = fields["x"], fields["scalar_type"]
    while inner := _operand(made, x, ir.AsTypeNode):
        source = inner["x"]
        if not holds(x.dtype, source.dtype):
            break
        x = source
    return x if SCALAR_TYPES[x.dtype] == target else fields | {"x": x}


# The significant bits and the largest exponent of two; int16 does not fit float16.
_FLOATS = {torch.float16: (11, 15), torch.bfloat16: (8, 127), torch.float32: (24, 127)}


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every number of `narrow` is one of `wide`."""
    if wide == narrow or narrow == torch.bool:
        return True
    if wide == torch.bool:
        return False
    if narrow.is_floating_point:
        return wide in _FLOATS and all(w >= n for w, n in zip(_FLOATS[wide], _FLOATS[narrow]))
    range_ = torch.iinfo(narrow)
    if wide.is_floating_point:
        return max(-range_.min, range_.max).bit_length() <= _FLOATS[wide][0]
    return torch.iinfo(wide).min <= range_.min and range_.max <= torch.iinfo(wide).max


def _neutral(number: int, kinds: str, commutes: bool = True) -> Callable:
    """Arithmetic with a number that changes nothing, on dtypes of `kinds`: b, i and f."""

    def rule(made, fields):
        a, b = fields["a"], fields["b"]
        for x, other in ((a, b), (b, a)) if commutes else ((a, b),):
            same = x.dtype == other.dtype and _kind(x.dtype) in kinds and x.space != Space.BUFFER
            if same and other.number == number:
                return x
        return fields

    return rule


def _kind(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"


_RULES = {
    ir.TransposeNode: _transpose,
    ir.ReshapeNode: _reshape,
    ir.AsTypeNode: _as_type,
    # Not floats: -0 + 0 is 0.
    ir.AddNode: _neutral(0, "i"),
    ir.SubtractNode: _neutral(0, "i", commutes=False),
    ir.MultiplyNode: _neutral(1, "if"),
    ir.DivideNode: _neutral(1, "f", commutes=False),
    ir.BitwiseAndNode: _neutral(True, "b"),
    ir.LogicalAndNode: _neutral(True, "b"),
}
