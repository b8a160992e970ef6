"""Float64 tensors, as sums of two float32 tensors.

MLX supports float64 on a CPU only, but many models compute the angles of rotary embeddings in float64 and cast their
cosines and sines to float32. `with_constants` computes what depends on no input with torch. `with_float32_numbers` also
computes the rest, with pairs of float32 tensors, which have 48 bits of precision and the range of float32.

The error-free sums and products are those of Dekker and Knuth: T. J. Dekker, "A floating-point technique for extending
the available precision", Numerische Mathematik 18, 1971.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ..extents import is_same_shape
from .rewriter import MOVES, NoRule, Rewriter, has_replaced, rule_decorator

aten = torch.ops.aten

# The largest number of elements of a tensor that torch computes at export.
_MAX_ELEMENTS = 2**20

# The magnitudes of constants whose two parts are normal float32 numbers.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**126

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Pair:
    """A float64 tensor, the sum of two float32 ones: `high` is the sum, rounded, and `low` is None if it is zero.

    `is_exact` is False if the sum has only the precision of float32.
    """

    high: Node
    low: Node | None = None
    is_exact: bool = True


@dataclass(frozen=True)
class Known:
    """A float64 tensor that depends on no input, or a list of them."""

    data: Any


_RULES: dict[Any, Callable] = {}
_rule = rule_decorator(_RULES)


def with_float32_numbers(program: ExportedProgram) -> ExportedProgram:
    """Return a program that computes with float32 tensors where it computed with float64.

    Float64 tensors that depend on each other are replaced together. They stay if there is no rule for one of them: for
    an input or output, and for an operator that `_RULES` lacks. Returns `program` itself if all of them stay.
    """
    return _replaced(program, _Float64Rewriter)


def with_constants(program: ExportedProgram) -> ExportedProgram:
    """Return a program with constants in place of the float64 tensors that depend on no input.

    Float64 tensors that depend on each other stay if one of them depends on an input.
    """
    return _replaced(program, _ConstantsRewriter)


def _replaced(program: ExportedProgram, rewriter_of: type[_Float64Rewriter]) -> ExportedProgram:
    groups = _groups(program)
    kept: set[Node] = set()
    while any(node not in kept for node in groups):
        rewriter = rewriter_of(program, kept)
        try:
            return rewriter.rewrite()
        except NoRule:
            kept |= groups[rewriter.node]
    return program


def _groups(program: ExportedProgram) -> dict[Node, set[Node]]:
    """Return the nodes with a float64 tensor as operand or result, each with its group.

    Two nodes are in the same group if one has a float64 result that the other reads.
    """
    groups: dict[Node, set[Node]] = {}
    for node in program.graph.nodes:
        if has_replaced(node, _is_float64):
            group = groups[node] = {node}
            for operand in node.all_input_nodes:
                if _has_float64(operand) and groups[operand] is not group:
                    smaller, group = sorted((group, groups[operand]), key=len)
                    group |= smaller
                    groups |= dict.fromkeys(smaller, group)
    return groups


def _is_float64(value: torch.Tensor) -> bool:
    return value.dtype == torch.float64


def _has_float64(node: Node) -> bool:
    return any(isinstance(v, torch.Tensor) and _is_float64(v) for v in tree_leaves(node.meta.get("val")))


class _Float64Rewriter(Rewriter):
    """Replaces each float64 tensor by a `Known` or a `Pair`. The rules get a `Pair` for each."""

    rules = _RULES
    is_replaced = staticmethod(_is_float64)

    def __init__(self, program: ExportedProgram, kept: Collection[Node]):
        super().__init__(program, kept)
        self.computable = _computable_nodes(program)
        self.data: dict[Node, Any] = {}
        self.pairs: dict[Node, Pair] = {}

    def split(self, name: str, tensor: torch.Tensor) -> Known:
        if isinstance(tensor, FakeTensor):
            raise NoRule
        return Known(tensor)

    def replace(self) -> Any:
        if self.node not in self.computable:
            return super().replace()
        data = self._compute(self.node)
        return Known(data) if _has_float64(self.node) else self.constant(self.node.name, data)

    def argument(self, node: Node) -> Any:
        value = self.values[node]
        if not isinstance(value, Known):
            return value
        if node not in self.pairs:
            self.pairs[node] = self.pair(value.data)
        return self.pairs[node]

    def checked(self, value: Node | Pair) -> Node | Pair:
        expected = self.node.meta.get("val")
        result = value.high if isinstance(value, Pair) else value
        if isinstance(expected, torch.Tensor) and not is_same_shape(result.meta["val"].shape, expected.shape):
            raise NoRule
        if _has_float64(self.node) != isinstance(value, Pair):
            raise NoRule
        return value

    def pair(self, data: Any) -> Pair:
        """Return a float64 tensor as a `Pair` of constants."""
        if not isinstance(data, torch.Tensor):
            raise NoRule
        size = data.abs()
        if not bool(((size >= _SMALLEST) & (size <= _LARGEST) | (size == 0)).all()):
            raise NoRule
        high = data.float()
        low = (data - high).float()
        return Pair(self.constant("high", high), self.constant("low", low) if bool(low.any()) else None)

    def number(self, value: float) -> Pair:
        """Return a number as a 0-d `Pair`."""
        return self.pair(torch.tensor(value, dtype=torch.float64))

    def _compute(self, node: Node) -> Any:
        """Return what a node of `computable` computes: a tensor or a list of tensors."""
        if node.op == "placeholder":
            return _stored(self.program, node)
        if node not in self.data:
            args, kwargs = map_arg((node.args, node.kwargs), self._compute)
            with torch.no_grad():
                self.data[node] = node.target(*args, **kwargs)
        return self.data[node]


class _ConstantsRewriter(_Float64Rewriter):
    """Replaces only what depends on no input: it has no rules, and no pairs."""

    rules: ClassVar[dict] = {}


def _computable_nodes(program: ExportedProgram) -> set[Node]:
    """Return the nodes that depend on no input, and whose result is small or no larger than an operand."""
    nodes: set[Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            is_computable = not _is_written(node) and _stored(program, node) is not None
        else:
            operands = node.all_input_nodes
            limit = max([_MAX_ELEMENTS, *(_num_elements(n) for n in operands if n in nodes)])
            is_computable = nodes.issuperset(operands) and _is_pure(node) and _num_elements(node) <= limit
        if is_computable:
            nodes.add(node)
    return nodes


def _stored(program: ExportedProgram, node: Node) -> torch.Tensor | None:
    """Return the data of a constant, or of a float64 parameter or buffer that the program does not write, else None."""
    signature = program.graph_signature
    name = signature.inputs_to_lifted_tensor_constants.get(node.name)
    if name is None and _has_float64(node):
        name = signature.inputs_to_parameters.get(node.name) or signature.inputs_to_buffers.get(node.name)
    if name is None or name in signature.buffers_to_mutate.values():
        return None
    tensor = program.constants[name] if name in program.constants else program.state_dict[name]
    return None if isinstance(tensor, FakeTensor) else tensor.detach()


def _num_elements(node: Node) -> float:
    """Return the number of elements of the tensors of `node`; infinity for a dynamic shape or no tensor."""
    tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    if not tensors or not all(isinstance(size, int) for v in tensors for size in v.shape):
        return math.inf
    return sum(v.numel() for v in tensors)


def _is_pure(node: Node) -> bool:
    """Whether `node` always computes the same from the same operands, on a CPU, and no node writes into its result."""
    if _is_written(node) or any(getattr(v, "device", _CPU) != _CPU for v in tree_leaves(node.meta.get("val"))):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    return (
        node.target.namespace == "aten"
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and "empty" not in node.target._opname  # the elements of `empty` are undefined
        and not node.target._schema.is_mutable
    )


def _is_written(node: Node) -> bool:
    """Whether a node writes into the result of `node`, or into a view of it."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        is_view = user.target is operator.getitem or schema and any(r.alias_info is not None for r in schema.returns)
        if schema and schema.is_mutable or is_view and _is_written(user):
            return True
    return False


# -- error-free arithmetic -----------------------------------------------------------------------


def _add(P: _Float64Rewriter, a: Node, b: Node) -> Node:
    return P.call(aten.add.Tensor, a, b)


def _sub(P: _Float64Rewriter, a: Node, b: Node) -> Node:
    return P.call(aten.sub.Tensor, a, b)


def _mul(P: _Float64Rewriter, a: Node, b: Node | float) -> Node:
    return P.call(aten.mul.Tensor, a, b)


def _finite(P: _Float64Rewriter, error: Node) -> Node:
    """Return `error`, or zero where the number whose error it is is infinite or NaN."""
    return P.call(aten.nan_to_num.default, error, 0.0, 0.0, 0.0)


def _normalized(P: _Float64Rewriter, a: Node, b: Node) -> Pair:
    """Return the sum of `a` and a much smaller `b`."""
    b = _finite(P, b)
    high = _add(P, a, b)
    return Pair(high, _finite(P, _sub(P, b, _sub(P, high, a))))


def _exact_sum(P: _Float64Rewriter, a: Node, b: Node) -> tuple[Node, Node]:
    """Return a + b and its rounding error."""
    high = _add(P, a, b)
    part = _sub(P, high, a)
    return high, _add(P, _sub(P, a, _sub(P, high, part)), _sub(P, b, part))


def _halves(P: _Float64Rewriter, a: Node) -> tuple[Node, Node]:
    """Return two numbers of 12 bits whose sum is `a`."""
    scaled = _mul(P, a, 4097.0)
    high = _sub(P, scaled, _sub(P, scaled, a))
    return high, _sub(P, a, high)


def _exact_product(P: _Float64Rewriter, a: Node, b: Node) -> tuple[Node, Node]:
    """Return a · b and its rounding error."""
    product = _mul(P, a, b)
    (a, a_low), (b, b_low) = _halves(P, a), _halves(P, b)
    error = _sub(P, _mul(P, a, b), product)
    for x, y in ((a, b_low), (a_low, b), (a_low, b_low)):
        error = _add(P, error, _mul(P, x, y))
    return product, error


def _sum_of_pairs(P: _Float64Rewriter, a: Pair, b: Pair) -> Pair:
    if not (a.is_exact and b.is_exact):
        raise NoRule  # the sum could be much smaller than the operands, and their errors would not
    high, error = _exact_sum(P, a.high, b.high)
    lows = [low for low in (a.low, b.low) if low is not None]
    if len(lows) == 2:
        low, low_error = _exact_sum(P, *lows)
        partial = _normalized(P, high, _add(P, error, low))
        return _normalized(P, partial.high, _add(P, partial.low, low_error))
    return _normalized(P, high, _add(P, error, lows[0]) if lows else error)


def _product_of_pairs(P: _Float64Rewriter, a: Pair, b: Pair) -> Pair:
    if not (a.is_exact and b.is_exact):
        return Pair(_mul(P, a.high, b.high), None, False)
    high, error = _exact_product(P, a.high, b.high)
    for x, y in ((a.high, b.low), (a.low, b.high)):
        if x is not None and y is not None:
            error = _add(P, error, _mul(P, x, y))
    return _normalized(P, high, error)


def _quotient_of_pairs(P: _Float64Rewriter, a: Pair, b: Pair) -> Pair:
    quotient = P.call(aten.div.Tensor, a.high, b.high)
    if not (a.is_exact and b.is_exact):
        return Pair(quotient, None, False)
    rest = _sum_of_pairs(P, a, _negated(P, _product_of_pairs(P, Pair(quotient), b)))
    return _normalized(P, quotient, P.call(aten.div.Tensor, rest.high, b.high))


def _negated(P: _Float64Rewriter, x: Pair) -> Pair:
    return _each(P, aten.neg.default, x)


def _each(P: _Float64Rewriter, target: Callable, x: Pair, *args: Any, **kwargs: Any) -> Pair:
    high, low = (None if part is None else P.call(target, part, *args, **kwargs) for part in (x.high, x.low))
    return Pair(high, low, x.is_exact)


def _as_pair(P: _Float64Rewriter, x: Any) -> Pair:
    """Return `x`, a tensor of any dtype or a number, as a pair. Raises `NoRule` for complex numbers."""
    if isinstance(x, Pair):
        return x
    if isinstance(x, (int, float)):
        return P.number(x)
    if not isinstance(x, Node) or not isinstance(x.meta["val"], torch.Tensor) or x.meta["val"].is_complex():
        raise NoRule
    high = P.cast(x, torch.float32)
    if x.meta["val"].dtype not in (torch.int32, torch.int64):
        return Pair(high)
    rest = P.call(aten.sub.Tensor, P.cast(x, torch.int64), P.cast(high, torch.int64))
    return Pair(high, P.cast(rest, torch.float32))


# -- rules ---------------------------------------------------------------------------------------


@_rule(*MOVES, aten.numpy_T)
def _each_part(P, x, *args, **kwargs):
    if not isinstance(x, Pair) or any(isinstance(a, Pair) for a in tree_leaves((args, kwargs))):
        raise NoRule
    return _each(P, P.node.target, x, *args, **kwargs)


@_rule(aten.cat, aten.stack, aten.meshgrid)
def _joined(P, tensors, *args, **kwargs):
    pairs = [_as_pair(P, x) for x in tensors]
    high = P.call(P.node.target, [p.high for p in pairs], *args, **kwargs)
    low = None
    if any(p.low is not None for p in pairs):
        lows = [P.call(aten.zeros_like.default, p.high) if p.low is None else p.low for p in pairs]
        low = P.call(P.node.target, lows, *args, **kwargs)
    return Pair(high, low, all(p.is_exact for p in pairs))


@_rule(aten.add, aten.sub, aten.rsub)
def _sum(P, a, b, alpha=1):
    a, b = _as_pair(P, a), _as_pair(P, b)
    if P.node.target._overloadpacket is aten.rsub:
        a, b = b, a
    b = b if alpha == 1 else _product_of_pairs(P, b, P.number(alpha))
    return _sum_of_pairs(P, a, b if P.node.target._overloadpacket is aten.add else _negated(P, b))


@_rule(aten.mul)
def _product(P, a, b):
    return _product_of_pairs(P, _as_pair(P, a), _as_pair(P, b))


@_rule(aten.outer)
def _outer(P, a, b):
    a, b = _as_pair(P, a), _as_pair(P, b)
    return _product_of_pairs(P, _each(P, aten.unsqueeze.default, a, 1), b)


@_rule(aten.matmul, aten.mm, aten.bmm)
def _matrix_product(P, a, b):
    """The product of a matrix with one column and a matrix with one row."""
    a, b = _as_pair(P, a), _as_pair(P, b)
    a_shape, b_shape = (x.high.meta["val"].shape for x in (a, b))
    if min(len(a_shape), len(b_shape)) < 2 or a_shape[-1] != 1 or b_shape[-2] != 1:
        raise NoRule
    return _product_of_pairs(P, a, b)


@_rule(aten.einsum)
def _einsum(P, equation, operands, path=None):
    """A product without sums, such as the outer product "i,j->ij"."""
    inputs, arrow, output = equation.replace(" ", "").replace("...", ".").partition("->")
    names = inputs.split(",")
    if not arrow or len(operands) != 2 or set(output) != set(names[0]) | set(names[1]) or "." in names[1]:
        raise NoRule
    if any(len(set(name)) != len(name) for name in (*names, output)):
        raise NoRule
    pairs = [_as_pair(P, x) for x in operands]
    if "." in output:
        output = _without_ellipsis(output, names, pairs)
    return _product_of_pairs(P, *(_aligned(P, x, name, output) for x, name in zip(pairs, names)))


def _without_ellipsis(output: str, names: list[str], pairs: list[Pair]) -> str:
    """Replace the ellipsis of the first operand and of the output by one digit per dimension. Returns the output."""
    count = pairs[0].high.meta["val"].ndim - len(names[0]) + 1
    digits = "".join(map(str, range(count)))
    names[0] = names[0].replace(".", digits)
    return output.replace(".", digits)


def _aligned(P: _Float64Rewriter, x: Pair, name: str, output: str) -> Pair:
    """Return `x`, whose dimensions have the letters `name`, with the dimensions of `output`, some of them of size 1."""
    x = _each(P, aten.permute.default, x, sorted(range(len(name)), key=lambda d: output.index(name[d])))
    for d in (d for d, letter in enumerate(output) if letter not in name):
        x = _each(P, aten.unsqueeze.default, x, d)
    return x


@_rule(aten.div)
def _quotient(P, a, b, rounding_mode=None):
    if rounding_mode is not None:
        raise NoRule
    return _quotient_of_pairs(P, _as_pair(P, a), _as_pair(P, b))


@_rule(aten.reciprocal)
def _reciprocal(P, x):
    return _quotient_of_pairs(P, P.number(1.0), x)


@_rule(aten.cos)
def _cos(P, x):
    if x.low is None:
        return Pair(P.call(aten.cos.default, x.high), None, False)
    cosines, sines = (_mul(P, P.call(f, x.high), P.call(f, x.low)) for f in (aten.cos.default, aten.sin.default))
    return Pair(_sub(P, cosines, sines), None, False)


@_rule(aten.sin)
def _sin(P, x):
    if x.low is None:
        return Pair(P.call(aten.sin.default, x.high), None, False)
    a = _mul(P, P.call(aten.sin.default, x.high), P.call(aten.cos.default, x.low))
    b = _mul(P, P.call(aten.cos.default, x.high), P.call(aten.sin.default, x.low))
    return Pair(_add(P, a, b), None, False)


@_rule(aten.to, aten._to_copy, aten.type_as)
def _to(P, x, *args, **kwargs):
    dtype = P.node.meta["val"].dtype
    if dtype == torch.float64:
        return _as_pair(P, x)
    if not isinstance(x, Pair) or not dtype.is_floating_point:
        raise NoRule
    return P.cast(x.high, dtype)


@_rule(aten.arange)
def _arange(P, *numbers, **kwargs):
    numbers = [int(n) if isinstance(n, float) and n.is_integer() else n for n in numbers]
    values = [n.meta["val"] if isinstance(n, Node) else n for n in numbers]
    if not all(isinstance(value, (int, torch.SymInt)) for value in values):
        raise NoRule
    return _as_pair(P, P.call(P.node.target, *numbers, dtype=torch.int64, device=_CPU))


@_rule(aten.sym_size)
def _size(P, x, *args):
    return P.call(P.node.target, x.high, *args)
