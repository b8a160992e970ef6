"""Elementwise operators: arithmetic, comparison, logic, rounding, selection, casts and softmax.

The tables `UNARY`, `BINARY`, `COMPARE` and `LOGICAL` map the name of an ATen operator to its IR node. The functions
below the tables lower the operators that need other arguments or several instructions.
"""

from __future__ import annotations

import math
import operator

import torch

from ..builder import dtypes
from ..builder.lowering import Lowering
from ..builder.peephole import can_represent
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import TensorSlot, ValueSlot
from ..extents import is_empty
from ..serialization import ir

aten = torch.ops.aten

UNARY = {
    "abs": ir.AbsNode,
    "acos": ir.ArccosNode,
    "acosh": ir.ArccoshNode,
    "asin": ir.ArcsinNode,
    "asinh": ir.ArcsinhNode,
    "atan": ir.ArctanNode,
    "atanh": ir.ArctanhNode,
    "bitwise_not": ir.BitwiseInvertNode,
    "ceil": ir.CeilNode,
    "cos": ir.CosNode,
    "cosh": ir.CoshNode,
    "erfinv": ir.ErfInvNode,
    "exp": ir.ExpNode,
    "expm1": ir.Expm1Node,
    "floor": ir.FloorNode,
    "log": ir.LogNode,
    "log10": ir.Log10Node,
    "log1p": ir.Log1pNode,
    "log2": ir.Log2Node,
    "logical_not": ir.LogicalNotNode,
    "neg": ir.NegNode,
    "reciprocal": ir.ReciprocalNode,
    "round": ir.RoundNode,
    "rsqrt": ir.RsqrtNode,
    "sigmoid": ir.SigmoidNode,
    "sign": ir.SignNode,
    "silu": ir.SiluNode,
    "sin": ir.SinNode,
    "sinh": ir.SinhNode,
    "sqrt": ir.SqrtNode,
    "tan": ir.TanNode,
    "tanh": ir.TanhNode,
    "trunc": ir.TruncNode,
}

# In the tables below, a name stands for all overloads of the operator, such as `.Tensor` and `.Scalar`.
BINARY = {
    "remainder": ir.RemainderNode,
    "maximum": ir.MaximumNode,
    "minimum": ir.MinimumNode,
    "atan2": ir.Atan2Node,
    "logaddexp": ir.LogAddExpNode,
    "bitwise_and": ir.BitwiseAndNode,
    "bitwise_or": ir.BitwiseOrNode,
    "bitwise_xor": ir.BitwiseXorNode,
}

COMPARE = {
    "eq": ir.EqualNode,
    "ne": ir.NotEqualNode,
    "lt": ir.LessNode,
    "le": ir.LessEqualNode,
    "gt": ir.GreaterNode,
    "ge": ir.GreaterEqualNode,
}

LOGICAL = {"logical_and": ir.LogicalAndNode, "logical_or": ir.LogicalOrNode, "logical_xor": ir.NotEqualNode}


def overloads(name: str) -> list[torch._ops.OpOverload]:
    """Return the functional overloads of an ATen operator whose operands are tensors, or a tensor and a number."""
    packet = getattr(aten, name)
    kinds = (
        "default",
        "Tensor",
        "Scalar",
        "self",
        "other",
        "Tensor_Tensor",
        "Tensor_Scalar",
        "Scalar_Tensor",
        "Tensor_mode",
        "Scalar_mode",
    )
    found = [getattr(packet, k) for k in packet.overloads() if k in kinds]
    return [o for o in found if any(isinstance(a.type, torch.TensorType) for a in o._schema.arguments)]


def _as_tensors(P: Lowering, dtype: torch.dtype, *values):
    """Return `values` as tensor slots of `dtype`: tensors are cast, and numbers become 0-d constants."""
    return [P.cast(v, dtype) if hasattr(v, "dtype") else P.scalar(v, dtype) for v in values]


def _unary(op):
    def lower(P: Lowering, self):
        dtype = P.out.dtype
        # An operator such as exp promotes integers to floating point.
        return P.emit(op, x=P.cast(self, dtype) if dtype.is_floating_point else self)

    return lower


def _binary(op):
    def lower(P: Lowering, **arguments):
        a, b = _as_tensors(P, P.out.dtype, *arguments.values())
        return P.emit(op, a=a, b=b)

    return lower


def _compare(op):
    def lower(P: Lowering, **arguments):
        a, b = _as_tensors(P, dtypes.promote(*arguments.values()), *arguments.values())
        return P.emit(op, a=a, b=b)

    return lower


def _logical(op):
    def lower(P: Lowering, **arguments):
        a, b = (P.cast(v, torch.bool) for v in arguments.values())
        return P.emit(op, a=a, b=b)

    return lower


for _name, _op in UNARY.items():
    REGISTRY.add(getattr(aten, _name).default, _unary(_op))
for _table, _handler in ((BINARY, _binary), (COMPARE, _compare), (LOGICAL, _logical)):
    for _name, _op in _table.items():
        REGISTRY.add(overloads(_name), _handler(_op))


@REGISTRY.lower(aten.erf.default)
def erf(P: Lowering, self):
    return P.emit(ir.ErfNode, x=P.cast(self, P.out.dtype))


@REGISTRY.form(ir.ErfNode, always=True)
def _erf(P: Lowering, n, env):
    """Return 0 itself for 0: MLX's CPU kernel changes its sign."""
    is_zero = P.emit(ir.EqualNode, a=n.x, b=P.scalar(0, n.x.dtype))
    return P.emit(ir.WhereNode, condition=is_zero, x=n.x, y=P.emit(ir.ErfNode, x=n.x))


@REGISTRY.lower(aten.round.decimals)
def round_decimals(P: Lowering, self, decimals):
    # The product with a power of ten may overflow in float16, and is rounded in half precision. torch uses float32.
    is_half = self.dtype in dtypes.HALVES
    x = P.cast(self, torch.float32) if is_half else self
    return P.cast(P.emit(ir.RoundNode, x=x, decimals=decimals), self.dtype)


def _scaled(P: Lowering, x, alpha, dtype):
    if alpha == 1:
        return x
    a, b = _as_tensors(P, dtype, x, alpha)
    return P.emit(ir.MultiplyNode, a=a, b=b)


@REGISTRY.lower(*overloads("add"))
def add(P: Lowering, self, other, alpha):
    dtype = P.out.dtype
    a, b = _as_tensors(P, dtype, self, _scaled(P, other, alpha, dtype))
    # torch adds bools with a logical or.
    return P.emit(ir.LogicalOrNode if dtype == torch.bool else ir.AddNode, a=a, b=b)


@REGISTRY.lower(*overloads("sub"))
def sub(P: Lowering, self, other, alpha):
    dtype = P.out.dtype
    a, b = _as_tensors(P, dtype, self, _scaled(P, other, alpha, dtype))
    return P.emit(ir.SubtractNode, a=a, b=b)


@REGISTRY.lower(*overloads("rsub"))
def rsub(P: Lowering, self, other, alpha):
    return sub(P, other, self, alpha)


@REGISTRY.lower(*overloads("mul"))
def mul(P: Lowering, self, other):
    return _in_float32_if_needed(P, ir.MultiplyNode, self, other)


@REGISTRY.lower(*overloads("div"))
def div(P: Lowering, self, other, rounding_mode=None):
    dtype = P.out.dtype
    if rounding_mode == "floor":
        return floor_divide(P, self, other)
    if rounding_mode == "trunc" and not dtype.is_floating_point:
        return P.trace(_truncated_quotient, *_as_tensors(P, dtype, self, other))[0]
    if rounding_mode == "trunc" and _is_scalar(other):
        # torch does not round such a quotient before it is truncated.
        a, b = _as_tensors(P, torch.float32, self, _number(other))
        return P.cast(P.emit(ir.TruncNode, x=P.emit(ir.DivideNode, a=a, b=b)), dtype)
    quotient = _in_float32_if_needed(P, ir.DivideNode, self, other)
    return P.emit(ir.TruncNode, x=quotient) if rounding_mode == "trunc" else quotient


@REGISTRY.lower(*overloads("floor_divide"))
def floor_divide(P: Lowering, self, other):
    dtype = P.out.dtype
    if dtype.is_floating_point:
        (a,) = _as_tensors(P, dtype, self)  # torch rounds a dividend to the dtype, but no divisor
        a, b = _as_tensors(P, torch.float32, a, _number(other))
        return P.cast(P.trace(_floored_quotient, a, b)[0], dtype)
    a, b = _as_tensors(P, dtype, self, other)
    return P.emit(ir.FloorDivideNode, a=a, b=b)


def _in_float32_if_needed(P: Lowering, op, self, other):
    """Emit a product or quotient, in float32 if the result has half precision but an operand is a scalar beyond it.

    In torch, such an operand is not rounded to the dtype of the result.
    """
    dtype = P.out.dtype
    operands = _number(self), _number(other)
    is_half = dtype in dtypes.HALVES
    wide = torch.float32 if is_half and any(_exceeds(v, dtype) for v in operands) else dtype
    a, b = _as_tensors(P, wide, *operands)
    return P.cast(P.emit(op, a=a, b=b), dtype)


def _is_scalar(x) -> bool:
    """Whether `x` is a number or a 0-d tensor."""
    return not isinstance(x, TensorSlot) or x.ndim == 0


def _number(x):
    """Return the number of a constant that was a Python number in the source, and any other operand itself."""
    return x.constant_value if isinstance(x, TensorSlot) and x.constant_value is not None else x


def _exceeds(x, dtype: torch.dtype) -> bool:
    """Whether `x` is a scalar that may be finite and not 0, but outside the normal range of `dtype`."""
    if isinstance(x, TensorSlot):
        return x.ndim == 0 and not can_represent(dtype, x.dtype)
    if isinstance(x, ValueSlot):
        return True
    limits = torch.finfo(dtype)
    return math.isfinite(x) and x != 0 and not limits.smallest_normal <= abs(x) <= limits.max


def _floored_quotient(a, b):
    """Floor division as Python and torch define it: by way of the remainder.

    floor(a / b) would differ: inf // 1 is NaN, but floor(inf / 1) is inf; 1 // 0.1 is 9, but floor(1 / 0.1) is 10.
    """
    remainder = torch.fmod(a, b)
    quotient = (a - remainder) / b
    rounds_down = (remainder != 0) & ((b < 0) != (remainder < 0))
    quotient = torch.where(rounds_down, quotient - 1, quotient)
    floored = torch.floor(quotient)
    floored = torch.where(quotient - floored > 0.5, floored + 1, floored)
    floored = torch.where(quotient == 0, 0 * (a / b), floored)
    return torch.where(b == 0, a / b, floored)


def _truncated_quotient(a, b):
    """Divide integers, rounding towards zero: one more than the floor if the quotient is negative and not exact."""
    return torch.floor_divide(a, b) + _is_rounded_down(a, b, torch.remainder(a, b)).to(a.dtype)


def _is_rounded_down(a, b, remainder):
    """Whether the floor of the quotient of two integers differs from the quotient rounded towards zero."""
    return (remainder != 0) & ((a < 0) != (b < 0))


# Exponents for which torch computes the power by other functions than pow, and the nodes that compute the same.
_SPECIAL_POWERS: dict[float, list[type[ir.Op]]] = {
    2: [ir.SquareNode],
    -1: [ir.ReciprocalNode],
    -2: [ir.SquareNode, ir.ReciprocalNode],
}

# Exponents for which torch computes a root, but not in float16. The handler must do the same, because root and power
# differ at -inf and -0.
_ROOTS: dict[float, list[type[ir.Op]]] = {0.5: [ir.SqrtNode], -0.5: [ir.RsqrtNode]}


@REGISTRY.lower(*overloads("pow"))
def pow(P: Lowering, self, exponent):
    a, b = _as_tensors(P, P.out.dtype, self, exponent)
    is_number = isinstance(exponent, (int, float)) and a.dtype.is_floating_point
    if is_number and exponent == 1:
        return a
    if is_number and exponent == 3:
        return P.emit(ir.MultiplyNode, a=P.emit(ir.SquareNode, x=a), b=a)
    special = _SPECIAL_POWERS | (_ROOTS if a.dtype != torch.float16 else {})
    if is_number and exponent in special:
        for op in special[exponent]:
            a = P.emit(op, x=a)
        return a
    return P.emit(ir.PowerNode, a=a, b=b)


@REGISTRY.lower(*overloads("fmod"))
def fmod(P: Lowering, self, other):
    a, b = _as_tensors(P, P.out.dtype, self, other)
    return P.trace(_fmod, a, b)[0]


def _fmod(a, b):
    """Compute the remainder as in C, which has the sign of the dividend."""
    if a.is_floating_point():
        magnitude = torch.remainder(torch.abs(a), torch.abs(b))
        return torch.where(a < 0, -magnitude, magnitude)
    # The lowest integer has no magnitude.
    remainder = torch.remainder(a, b)
    return torch.where(_is_rounded_down(a, b, remainder), remainder - b, remainder)


@REGISTRY.lower(aten.hypot.default)
def hypot(P: Lowering, self, other):
    return P.trace(_hypot, *_as_tensors(P, P.out.dtype, self, other))[0]


def _hypot(a, b):
    """Compute sqrt(a^2 + b^2), with both operands divided by the larger one, so that the squares do not overflow."""
    a, b = torch.abs(a), torch.abs(b)
    large, small = torch.maximum(a, b), torch.minimum(a, b)
    ratio = torch.where((large == 0) | torch.isinf(large), 0, small / large)
    # As in C, an infinity wins over NaN.
    return torch.where(torch.isinf(a) | torch.isinf(b), math.inf, large * torch.sqrt(1 + ratio * ratio))


@REGISTRY.lower(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(P: Lowering, condition, self, other):
    x, y = _as_tensors(P, P.out.dtype, self, other)
    return P.emit(ir.WhereNode, condition=P.cast(condition, torch.bool), x=x, y=y)


@REGISTRY.lower(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(P: Lowering, self, mask, value):
    (x,) = _as_tensors(P, P.out.dtype, value)
    return P.emit(ir.WhereNode, condition=mask, x=x, y=self)


@REGISTRY.lower(aten.clamp.default, aten.clamp.Tensor)
def clamp(P: Lowering, self, min=None, max=None):
    dtype = P.out.dtype
    bounds = {"a_min": min, "a_max": max}
    bounds = {k: _as_tensors(P, dtype, v)[0] for k, v in bounds.items() if v is not None}
    return P.emit(ir.ClipNode, x=P.cast(self, dtype), **bounds)


@REGISTRY.lower(aten.relu.default)
def relu(P: Lowering, self):
    return P.emit(ir.MaximumNode, a=self, b=P.scalar(0, self.dtype))


@REGISTRY.lower(aten.gelu.default)
def gelu(P: Lowering, self, approximate):
    return P.emit(ir.GeluNode, x=self, approximate=approximate)


@REGISTRY.lower(aten.square.default)
def square(P: Lowering, self):
    return P.emit(ir.SquareNode, x=P.cast(self, P.out.dtype))


@REGISTRY.lower(aten.isnan.default)
def isnan(P: Lowering, self):
    return P.emit(ir.NotEqualNode, a=self, b=self)


@REGISTRY.lower(aten.isinf.default)
def isinf(P: Lowering, self):
    if not self.dtype.is_floating_point:
        return P.cast(P.emit(ir.FullLikeNode, x=self, v=0), torch.bool)
    infinity = P.scalar(float("inf"), self.dtype)
    magnitude = P.emit(ir.AbsNode, x=self)
    return P.emit(ir.EqualNode, a=magnitude, b=infinity)


@REGISTRY.lower(aten._to_copy.default, torch.ops.dim_order_ops._to_dim_order_copy.default)
def to_copy(P: Lowering, self, dtype):
    dtype = dtype or self.dtype
    # ExecuTorch inserts casts of the Python numbers that it makes tensors of. torch does not round these numbers.
    is_number = P.node.args[0].name.startswith("_lifted_tensor_constant")
    if self.constant_value is not None and dtype in dtypes.HALVES and not is_number:
        return P.full([], self.constant_value, dtype)
    return P.cast(self, dtype)


@REGISTRY.lower(aten.softmax.int, aten._softmax.default)
def softmax(P: Lowering, self, dim, dtype=None, half_to_float=False):
    x = P.cast(self, P.out.dtype)
    if x.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    # torch accumulates half precision in float32.
    return P.emit(ir.SoftmaxNode, x=x, axis=dim, precise=True)


@REGISTRY.lower(aten.log_softmax.int, aten._log_softmax.default)
def log_softmax(P: Lowering, self, dim, dtype=None, half_to_float=False):
    x = P.cast(P.cast(self, P.out.dtype), torch.float32)
    if x.ndim == 0:
        raise Unsupported("0-d input is unsupported; reshape it to [1] first")
    if is_empty(x.shape):  # the maximum of no elements is undefined
        return P.cast(x, P.out.dtype)
    # log_softmax(x) = (x - max) - logsumexp(x - max). Without the subtraction of the maximum, the log of the sum would
    # be lost in the rounding if the maximum is large.
    largest = P.emit(ir.MaxNode, x=x, axes=[dim], keepdims=True)
    x = P.emit(ir.SubtractNode, a=x, b=largest)
    total = P.emit(ir.LogSumExpNode, x=x, axes=[dim], keepdims=True)
    return P.cast(P.emit(ir.SubtractNode, a=x, b=total), P.out.dtype)


@REGISTRY.lower(operator.getitem)
def getitem(P: Lowering, a, b):
    return a[b]
