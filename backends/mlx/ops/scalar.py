"""Integers on the host: sizes, arithmetic on sizes, and `item`; and assertions, for which no instruction is emitted."""

from __future__ import annotations

import math
import operator

import torch

from ..builder.registry import REGISTRY, Unsupported
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
    def lower(P, a, b):
        for value in (a, b):
            if not isinstance(value, int) and not (isinstance(value, ValueSlot) and value.kind is int):
                raise Unsupported("arithmetic on a symbolic float or bool is unsupported; use a tensor")
        return P.emit(op, a=a, b=b)

    return lower


for _target, _op in ARITHMETIC.items():
    REGISTRY.add(_target, _arithmetic(_op))


@REGISTRY.lower(operator.neg)
def negative(P, a):
    return _arithmetic(ir.SubtractIntNode)(P, 0, a)


@REGISTRY.lower(aten.sym_size.int)
def sym_size(P, self, dim):
    return P.size(self, dim)


@REGISTRY.lower(aten.sym_numel.default)
def sym_numel(P, self):
    extents = [P.size(self, i) for i in range(self.ndim)]
    total = math.prod(e for e in extents if isinstance(e, int))
    for extent in (e for e in extents if not isinstance(e, int)):
        total = P.emit(ir.MultiplyIntNode, a=extent, b=total)
    return total


@REGISTRY.lower(aten._local_scalar_dense.default, aten.item.default)
def local_scalar_dense(P, self):
    if self.dtype.is_floating_point:
        raise Unsupported("item() of a floating-point tensor is unsupported; keep the value as a 0-d tensor")
    return P.item(self)


def _no_instruction(P, **_):
    return None


# Assertions and the conditions that they check. The program does not repeat them: export has proven the asserted
# bounds, or the runtime checks the shapes of the inputs against the bounds in every call.
REGISTRY.add(
    [
        aten._assert_scalar.default,
        aten._assert_async.msg,
        aten._assert_tensor_metadata.default,
        aten.sym_constrain_range.default,
        aten.sym_constrain_range_for_size.default,
        torch.sym_not,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        operator.and_,
        operator.or_,
    ],
    _no_instruction,
)
