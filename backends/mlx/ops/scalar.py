"""Numbers on the host: sizes, arithmetic on sizes, `item`, and conditions.

No instruction is emitted for assertions and for conditions that are only asserted.
"""

from __future__ import annotations

import math
import operator

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported, aten_target
from ..builder.slots import ValueSlot
from ..serialization import ir

aten = torch.ops.aten

ARITHMETIC = {
    operator.add: ir.AddIntNode,
    operator.sub: ir.SubtractIntNode,
    operator.mul: ir.MultiplyIntNode,
    operator.floordiv: ir.FloorDivideIntNode,
    operator.mod: ir.ModIntNode,
}


def _arithmetic(op):
    def lower(P: Lowering, a, b):
        return P.emit(op, a=_checked(a, int), b=_checked(b, int))

    return lower


def _checked(value, kind):
    """Return `value`, a Python number or a value slot. Raises `Unsupported` if it is not of `kind`, int or bool."""
    if (value.kind if isinstance(value, ValueSlot) else type(value)) is not kind:
        if kind is bool:
            raise Unsupported("bitwise arithmetic on a symbolic integer is unsupported; use a tensor")
        raise Unsupported("arithmetic on a symbolic float or bool is unsupported; use a tensor")
    return value


for _target, _op in ARITHMETIC.items():
    REGISTRY.add(_target, _arithmetic(_op))
for _target in (operator.truediv, torch.sym_float):
    REGISTRY.decline(_target, "a symbolic float is unsupported; compute with tensors, such as torch.full((), size)")


@REGISTRY.lower(operator.neg)
def negative(P: Lowering, a):
    return _arithmetic(ir.SubtractIntNode)(P, 0, a)


@REGISTRY.lower(operator.pow)
def power(P: Lowering, a, b):
    """Lower a power with a Python number as exponent to products."""
    if not isinstance(b, int) or not 0 < b <= 64:
        raise Unsupported("a power of a size is supported only if the exponent is a Python number from 1 to 64")
    result = _checked(a, int)
    for bit in bin(b)[3:]:  # the bits after the first one, from the highest to the lowest
        result = P.emit(ir.MultiplyIntNode, a=result, b=result)
        if bit == "1":
            result = P.emit(ir.MultiplyIntNode, a=result, b=a)
    return result


@REGISTRY.lower(aten.sym_size.int)
def sym_size(P: Lowering, self, dim):
    return P.size(self, dim)


@REGISTRY.lower(aten.sym_numel.default)
def sym_numel(P: Lowering, self):
    """Lower the number of elements. Traced composites have this operator; exported graphs do not."""
    extents = [P.size(self, i) for i in range(self.ndim)]
    total = math.prod(extent for extent in extents if isinstance(extent, int))
    for extent in (extent for extent in extents if not isinstance(extent, int)):
        total = P.emit(ir.MultiplyIntNode, a=extent, b=total)
    return total


@REGISTRY.lower(aten._local_scalar_dense.default)
def local_scalar_dense(P: Lowering, self):
    if self.dtype.is_floating_point:
        raise Unsupported("item() of a floating-point tensor is unsupported; keep the value as a 0-d tensor")
    return P.item(self)


def _no_instruction(P: Lowering, **_):
    return None


# The program does not repeat assertions: export has proven the asserted bounds, or the runtime checks the shapes of the
# inputs against the bounds in every call.
ASSERTIONS = [
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten._assert_tensor_metadata.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
]
REGISTRY.add(ASSERTIONS, _no_instruction)


COMPARE = {
    operator.eq: ir.EqualNode,
    operator.ne: ir.NotEqualNode,
    operator.lt: ir.LessNode,
    operator.le: ir.LessEqualNode,
    operator.gt: ir.GreaterNode,
    operator.ge: ir.GreaterEqualNode,
}


def _compare(op):
    """Compare as 0-d tensors, because the IR has no comparison of host integers."""

    def compare(P: Lowering, a, b):
        x, y = (P.scalar(_checked(v, int), torch.int64) for v in (a, b))
        return P.emit(ir.ItemIntNode, x=P.emit(op, a=x, b=y), out=ValueSlot(bool))

    return compare


def _larger(P: Lowering, a, b):
    """Return the maximum: a, plus b - a if b is greater."""
    is_greater = _compare(ir.GreaterNode)(P, b, a)
    difference = P.emit(ir.SubtractIntNode, a=b, b=a)
    return P.emit(ir.AddIntNode, a=a, b=P.emit(ir.MultiplyIntNode, a=is_greater, b=difference))


@REGISTRY.lower(torch.sym_max)
def sym_max(P: Lowering, a, b):
    return _larger(P, a, b)


@REGISTRY.lower(torch.sym_min)
def sym_min(P: Lowering, a, b):
    return P.emit(ir.SubtractIntNode, a=P.emit(ir.AddIntNode, a=a, b=b), b=_larger(P, a, b))


def _not(P: Lowering, a):
    return _bool(P, ir.SubtractIntNode, 1, _checked(a, bool))


def _and(P: Lowering, a, b):
    return _bool(P, ir.MultiplyIntNode, _checked(a, bool), _checked(b, bool))


def _or(P: Lowering, a, b):
    return _not(P, _and(P, _not(P, a), _not(P, b)))


def _bool(P: Lowering, op, a, b):
    return P.emit(op, a=a, b=b, out=ValueSlot(bool))


def _condition(handler):
    """Return a handler of a condition: `handler`, but without an instruction for a condition that is only asserted."""

    def lower(P: Lowering, **operands):
        return None if _is_only_asserted(P.node) else handler(P, **operands)

    return lower


def _is_only_asserted(node) -> bool:
    return all(
        aten_target(user.target) in ASSERTIONS or user.target in CONDITIONS and _is_only_asserted(user)
        for user in node.users
    )


CONDITIONS = {op: _compare(node) for op, node in COMPARE.items()} | {
    torch.sym_not: _not,
    operator.and_: _and,
    operator.or_: _or,
}
for _target, _handler in CONDITIONS.items():
    REGISTRY.add(_target, _condition(_handler))
