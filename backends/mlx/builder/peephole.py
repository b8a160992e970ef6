"""Peephole optimization: drops an instruction without effect, or merges it with the instructions of its operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..serialization import ir
from .dtypes import SCALAR_TYPES
from .slots import Space, TensorSlot

_VIEWS = (ir.ReshapeNode, ir.ExpandDimsNode, ir.SqueezeNode)


def simplify(producers: Mapping[Any, Any], op: type[ir.Op], fields: dict[str, Any]) -> TensorSlot | dict[str, Any]:
    """Simplify an instruction that has not been emitted yet. Appends nothing.

    Returns a slot if that slot already holds the result of the instruction. Otherwise returns the fields with which to
    emit the instruction. `producers` maps a slot to the instruction that computes the slot.
    """
    rule = _RULES.get(op)
    return fields if rule is None else rule(producers, fields)


def _producer_fields(producers, x: TensorSlot, *ops: type[ir.Op]) -> dict[str, Any] | None:
    """Return the fields of the instruction that computes `x`.

    Returns None if that instruction is not one of `ops`. Also returns None if that instruction reads a
    buffer, because the buffer may have been overwritten since.
    """
    source = producers.get(x)
    if source is None or source.op not in ops or source.fields["x"].space == Space.BUFFER:
        return None
    return source.fields


def source_of_elements(producers: Mapping[Any, Any], x: TensorSlot) -> TensorSlot:
    """Return the slot from which views and broadcasts have made `x`, which has the same elements, some repeatedly."""
    while inner := _producer_fields(producers, x, *_VIEWS, ir.TransposeNode, ir.BroadcastToNode):
        x = inner["x"]
    return x


def _transpose(producers, fields):
    x, perm = fields["x"], list(fields["perm"])
    while inner := _producer_fields(producers, x, ir.TransposeNode):
        x, perm = inner["x"], [inner["perm"][axis] for axis in perm]
    if perm == list(range(len(perm))) and x.space != Space.BUFFER:
        return x
    return fields | {"x": x, "perm": perm}


def _reshape(producers, fields):
    x, shape = fields["x"], tuple(fields["shape"])
    while inner := _producer_fields(producers, x, *_VIEWS):
        x = inner["x"]
    is_static = all(isinstance(size, int) for size in shape)
    if is_static and x.shape == shape and x.space != Space.BUFFER:
        return x
    return fields | {"x": x}


def _as_type(producers, fields):
    """Cast directly from the operand of earlier casts if these casts preserve every value."""
    x, target = fields["x"], fields["scalar_type"]
    while inner := _producer_fields(producers, x, ir.AsTypeNode):
        source = inner["x"]
        if not can_represent(x.dtype, source.dtype):
            break
        x = source
    return x if SCALAR_TYPES[x.dtype] == target else fields | {"x": x}


# For each floating-point dtype: the number of significant bits, and the largest binary exponent.
_FLOATS = {torch.float16: (11, 15), torch.bfloat16: (8, 127), torch.float32: (24, 127)}


def can_represent(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is a value of `wide`. False for different dtypes of which MLX lacks one."""
    if wide == narrow or narrow == torch.bool:
        return True
    if wide == torch.bool:
        return False
    if narrow.is_floating_point:
        has_both = wide in _FLOATS and narrow in _FLOATS
        return has_both and all(w >= n for w, n in zip(_FLOATS[wide], _FLOATS[narrow]))
    limits = torch.iinfo(narrow)
    if wide.is_floating_point:
        return wide in _FLOATS and max(-limits.min, limits.max).bit_length() <= _FLOATS[wide][0]
    return torch.iinfo(wide).min <= limits.min and limits.max <= torch.iinfo(wide).max


def _neutral_element_rule(neutral: int, kinds: str, commutes: bool = True) -> Callable:
    """Return a rule that drops an operation one of whose operands is the constant `neutral`, the neutral element.

    The rule applies to the dtypes of `kinds`, a string of the letters b(ool), i(nteger) and f(loat). If the operation
    does not commute, only the second operand `b` can be the neutral element.
    """

    def rule(producers, fields):
        a, b = fields["a"], fields["b"]
        for x, other in ((a, b), (b, a)) if commutes else ((a, b),):
            keeps_dtype = x.dtype == other.dtype and _kind(x.dtype) in kinds
            if keeps_dtype and x.space != Space.BUFFER and other.constant_value == neutral:
                return x
        return fields

    return rule


def _kind(dtype: torch.dtype) -> str:
    return "f" if dtype.is_floating_point else "b" if dtype == torch.bool else "i"


_RULES: dict[type[ir.Op], Callable] = {
    ir.TransposeNode: _transpose,
    ir.ReshapeNode: _reshape,
    ir.AsTypeNode: _as_type,
    # Addition of 0 is kept for floats, because -0.0 + 0 is 0.0.
    ir.AddNode: _neutral_element_rule(0, "i"),
    ir.SubtractNode: _neutral_element_rule(0, "i", commutes=False),
    ir.MultiplyNode: _neutral_element_rule(1, "if"),
    ir.DivideNode: _neutral_element_rule(1, "f", commutes=False),
    ir.BitwiseAndNode: _neutral_element_rule(True, "b"),
    ir.LogicalAndNode: _neutral_element_rule(True, "b"),
}
