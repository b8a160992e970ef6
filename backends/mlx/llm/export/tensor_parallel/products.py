"""The operators that multiply by a weight or look up its rows."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch

from ....custom_ops import quantized

aten, mlx = torch.ops.aten, torch.ops.mlx


@dataclass(frozen=True)
class Operand:
    """A tensor of a weight: the values, or the scales or biases if the weight is packed.

    `out_axis` and `in_axis` are its axes of outputs and inputs. `per_input` elements stand for one input.
    """

    node: torch.fx.Node
    out_axis: int
    in_axis: int
    per_input: Fraction = Fraction(1)


@dataclass(frozen=True)
class Product:
    """A product of `x` [..., inputs] and a weight with `outputs` rows.

    `bias` is the index of the argument that is the bias, or None. A row of the weight can only be divided at multiples
    of `group`.
    """

    x: torch.fx.Node
    operands: tuple[Operand, ...]
    inputs: int
    outputs: int
    bias: int | None = None
    group: int = 1


@dataclass(frozen=True)
class Lookup:
    """A lookup of the rows `indices` of a weight with `rows` rows."""

    indices: torch.fx.Node
    operands: tuple[Operand, ...]
    rows: int


def product_of(node: torch.fx.Node) -> Product | None:
    """Return the product that `node` computes, or None."""
    reader = _PRODUCTS.get(node.target)
    return None if reader is None else reader(node, *node.args)


def lookup_of(node: torch.fx.Node) -> Lookup | None:
    """Return the lookup that `node` computes, or None."""
    if node.target == aten.embedding.default:
        weight, indices = node.args[:2]
        return Lookup(indices, (Operand(weight, 0, 1),), _shape(weight)[0])
    if node.target == quantized.quantized_embedding:
        indices, *packed = node.args
        operands, _ = _packed_operands(packed)
        return Lookup(indices, operands, _shape(packed[0])[0])
    return None


def _shape(node: torch.fx.Node) -> torch.Size:
    return node.meta["val"].shape


def _linear(node, x, weight, bias=None) -> Product:
    outputs, inputs = _shape(weight)
    return Product(x, (Operand(weight, 0, 1),), inputs, outputs, None if bias is None else 2)


def _addmm(node, bias, x, weight) -> Product | None:
    inputs, outputs = _shape(weight)
    return None if node.kwargs else Product(x, (Operand(weight, 1, 0),), inputs, outputs, 0)


def _matmul(node, x, weight) -> Product | None:
    if len(_shape(weight)) != 2:
        return None
    inputs, outputs = _shape(weight)
    return Product(x, (Operand(weight, 1, 0),), inputs, outputs)


def _gathered(node, x, weight, index) -> Product:
    _, outputs, inputs = _shape(weight)
    return Product(x, (Operand(weight, 1, 2),), inputs, outputs)


def _packed_operands(arguments) -> tuple[tuple[Operand, ...], int]:
    """Return the operands of a packed weight, and the size of its groups."""
    weight, scales, biases, group, bits, *_ = arguments
    first = len(_shape(weight)) - 2
    sizes = ((weight, Fraction(bits, 32)), (scales, Fraction(1, group)), (biases, Fraction(1, group)))
    return tuple(Operand(n, first, first + 1, size) for n, size in sizes if n is not None), group


def _quantized(node, x, *packed) -> Product:
    operands, group = _packed_operands(packed)
    weight, bits = packed[0], packed[4]
    return Product(x, operands, _shape(weight)[1] * 32 // bits, _shape(weight)[0], None, group)


def _gathered_quantized(node, x, index, *packed) -> Product:
    operands, group = _packed_operands(packed)
    weight, bits = packed[0], packed[4]
    return Product(x, operands, _shape(weight)[2] * 32 // bits, _shape(weight)[1], None, group)


_PRODUCTS = {
    aten.linear.default: _linear,
    aten.addmm.default: _addmm,
    aten.mm.default: _matmul,
    aten.matmul.default: _matmul,
    quantized.gathered_matmul: _gathered,
    quantized.quantized_matmul: _quantized,
    quantized.gathered_quantized_matmul: _gathered_quantized,
}
