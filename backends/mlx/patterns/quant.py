"""A dequantization, fused with the operator that uses its result.

A linear layer or `mm` becomes a `QuantizedMatmulNode`. An embedding looks up the matrix rows of the quantized weight
and then dequantizes only these rows.

A constant of 8-bit floats is cast when the program is serialized.

PT2E can round activations to integers and back with a scale that the program computes from them. These nodes become
arithmetic instructions together, because the scale is float64, which MLX lacks on a GPU.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..builder.bind import bind_arguments
from ..builder.lowering import Lowering
from ..builder.matcher import CASTS, Match, Matcher, NoMatch, attempt, is_call, tensor
from ..builder.registry import REGISTRY, aten_target
from ..ops.lib.quantized_weights import DEQUANTIZE, Affine, Microscaled, apply_factor, dequantize
from ..serialization import ir

_PERMUTE = ("aten.permute_copy.default", "aten.permute.default")
_T = ("aten.t_copy.default", "aten.t.default")


def _weight(P: Lowering, node: Node) -> Affine | Microscaled:
    """Return a description of the quantized constant that `node` dequantizes.

    Raises NoMatch if `node` is no dequantization of a constant, or if MLX has no packing for the constant. `node` does
    not join the match, because it may have other users. If it has no other user, its instruction is dropped later.
    """
    if not is_call(node, *DEQUANTIZE) or not all(map(P.is_constant, node.all_input_nodes)):
        raise NoMatch
    read = DEQUANTIZE[str(aten_target(node.target))]
    weight = read(P, **bind_arguments(node, P.value_or_none))  # type: ignore[operator]
    if weight is None or not weight.can_pack:
        raise NoMatch
    return weight


def _linear(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    x, weight, bias = m.arguments(node, ["aten.linear.default"], "input", "weight", "bias")
    weight = _weight(P, weight)

    def lower(P: Lowering, last):
        return _product(P, P.value(x), weight, None if bias is None else P.value(bias))

    return m.finish(node, lower)


def _embedding(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    options = "padding_idx", "scale_grad_by_freq", "sparse"  # which change gradients only
    weight, indices, *_ = m.arguments(node, ["aten.embedding.default"], "weight", "indices", *options)
    weight = _weight(P, weight)
    if tensor(indices).ndim == 0:
        raise NoMatch  # MLX dequantizes matrices only

    def lower(P: Lowering, last):
        index = P.value(indices)
        fields = weight.packed_fields(P, torch.float32)
        for name in ("w", "scales", "biases"):
            if fields[name] is not None:
                fields[name] = P.emit(ir.TakeNode, x=fields[name], index=index, axis=0)
        return dequantize(P, weight, fields)

    return m.finish(node, lower)


def _before_transpose(m: Matcher, node: Node) -> tuple[Node, list[int]]:
    """Return the operand of `node` and the permutation of its axes. Without one, the operand is `node` itself."""
    if is_call(node, *_PERMUTE):
        x, axes = m.arguments(node, _PERMUTE, "self", "dims")
        return x, list(axes)
    if is_call(node, *_T):
        (x,) = m.arguments(node, _T, "self")
        return x, list(reversed(range(tensor(x).ndim)))
    return node, list(range(tensor(node).ndim))


def _int8_product(P: Lowering, node: Node) -> Match:
    """Match x @ cast(transpose(q)) with a constant int8 matrix q.

    torchao multiplies the result of this product by the scales, in nodes outside the match.
    """
    m = Matcher(P)
    x, weight = m.arguments(node, ["aten.mm.default"], "self", "mat2")
    constant = Matcher(P)  # whose nodes stay outside of the match, because they may have other users
    transposed = constant.before_casts(weight, lambda source, target: target.is_floating_point)
    source, axes = _before_transpose(constant, transposed)
    if transposed is weight or axes != [1, 0] or not P.is_constant(source) or tensor(source).dtype != torch.int8:
        raise NoMatch
    if not tensor(x).is_floating_point():
        raise NoMatch
    q = P.value(source)
    unscaled = Affine(q, None, None, tuple(q.shape), -128, 127, tensor(node).dtype)
    if not unscaled.can_pack:
        raise NoMatch
    return m.finish(node, lambda P, last: _product(P, P.value(x), unscaled, None))


_BYTE_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def _byte_floats(P: Lowering, node: Node) -> Match:
    """Match cast(transpose(w)) or cast(w) with a constant w of 8-bit floats, for which MLX has no dtype.

    torchao multiplies the result by the scales, in nodes outside the match.
    """
    m = Matcher(P)
    source, _ = m.arguments(node, CASTS, "self", "dtype")
    weight, axes = _before_transpose(m, source)
    if not P.is_constant(weight) or tensor(weight).dtype not in _BYTE_FLOATS:
        raise NoMatch
    value, dtype = P.value(weight), tensor(node).dtype

    def lower(P: Lowering, last):
        name, shape = f"{value.name}.{node.name}", tensor(node).shape
        return P.constant(name, lambda: value.data().detach().to(dtype).permute(axes), shape, dtype)

    return m.finish(node, lower, hidden=_BYTE_FLOATS)


_CHOICES = tuple(f"quantized_decomposed.choose_qparams{kind}.tensor" for kind in ("", "_symmetric"))


def _dynamic_rounding(P: Lowering, node: Node) -> Match:
    """Match how PT2E rounds x to integers and back, with the scale and zero point that choose_qparams finds for x."""
    m = Matcher(P)
    names = "input", "scale", "zero_point", "quant_min", "quant_max", "dtype"
    q, scale, zero_point, _, _, _, out_dtype = m.arguments(
        node, ["quantized_decomposed.dequantize_per_tensor.tensor"], *names, "out_dtype"
    )
    x, *parameters, low, high, _ = m.arguments(q, ["quantized_decomposed.quantize_per_tensor.tensor"], *names)
    if parameters != [scale, zero_point]:
        raise NoMatch
    choice = m.result(scale, 0)
    source, *bounds, smallest_scale, dtype = m.arguments(
        choice, _CHOICES, "input", "quant_min", "quant_max", "eps", "dtype"
    )
    if m.result(zero_point, 1) is not choice or source is not x:
        raise NoMatch
    middle = None if is_call(choice, _CHOICES[0]) else 128 if dtype == torch.uint8 else 0

    def lower(P: Lowering, last):
        limits = *bounds, smallest_scale, middle, low, high
        return P.trace(_round_dynamically, P.value(x), *limits, out_dtype or torch.float32)[0]

    return m.finish(node, lower, hidden=(torch.float64,))


def _round_dynamically(x, lowest, highest, smallest_scale, middle, low, high, dtype):
    """Round x to integers and back, with the scale of its range.

    `middle` is the integer for zero, or None if it is chosen so that the integers from `lowest` to `highest` cover the
    range.
    """
    negative, positive = x.amin().clamp(max=0), x.amax().clamp(min=0)
    if middle is None:
        scale = (positive - negative) / (highest - lowest)
    else:
        scale = torch.maximum(-negative, positive) / ((highest - lowest) / 2)
    scale = scale.float().clamp(min=smallest_scale)
    zero = middle if middle is not None else (lowest - torch.round(negative / scale)).clamp(lowest, highest)
    q = torch.clamp(torch.round(x.float() * (1.0 / scale)) + zero, low, high)
    return ((q - zero) * scale).to(dtype)


def _product(P: Lowering, x, weight, bias):
    dtype = weight.product_dtype(x.dtype)
    y = P.emit(ir.QuantizedMatmulNode, x=P.cast(x, dtype), **weight.packed_fields(P, dtype), transpose=True)
    y = apply_factor(P, y, weight.factor, x.dtype)
    return y if bias is None else P.emit(ir.AddNode, a=y, b=bias)


for _pattern in (_linear, _embedding, _int8_product, _byte_floats, _dynamic_rounding):
    REGISTRY.pattern(attempt(_pattern))
