"""Quantized weights: the `mlx::quantized_*` operators over MLX's packing, and the operators of torchao and PT2E.

A product with a quantized weight is a `QuantizedMatmulNode` or a `GatherQmmNode`. An embedding is a `DequantizeNode` of
the matrix rows that it looks up. A dequantization of torchao or PT2E is a `DequantizeNode` of the repacked weight if
MLX has a packing for the block size and element type. Otherwise, it becomes arithmetic instructions.
`patterns/quant.py` fuses a dequantization with the product that reads its result.
"""

from __future__ import annotations

import torch
from torchao.quantization import quant_primitives as _  # noqa: F401  (defines torchao's operators)

from ..builder.lowering import Lowering
from ..builder.peephole import can_represent
from ..builder.registry import REGISTRY, Unsupported, tracing_handler
from ..builder.slots import Space
from ..custom_ops import quantized
from ..serialization import ir
from .lib.quantized_weights import (
    DEQUANTIZE,
    dequantize,
    holds,
    packed_words,
    read_affine,
    read_int4,
    read_mx,
    read_nvfp4,
    read_per_channel,
    read_per_tensor,
    torch_dtype,
)

aten = torch.ops.aten


@REGISTRY.lower(quantized.quantized_matmul)
def quantized_matmul(P: Lowering, x, w, scales, biases, **packing):
    operands = _operands(P, x, w, scales, biases)
    return P.cast(P.emit(ir.QuantizedMatmulNode, **operands, transpose=True, **packing), x.dtype)


@REGISTRY.lower(quantized.quantized_matmul_backward)
def quantized_matmul_backward(P: Lowering, grad, w, scales, biases, **packing):
    operands = _operands(P, grad, w, scales, biases)
    return P.cast(P.emit(ir.QuantizedMatmulNode, **operands, transpose=False, **packing), grad.dtype)


@REGISTRY.lower(quantized.gathered_quantized_matmul)
def gathered_quantized_matmul(P: Lowering, x, index, w, scales, biases, **packing):
    operands = _operands(P, x, w, scales, biases)
    return P.cast(P.emit(ir.GatherQmmNode, **operands, rhs_indices=index, transpose=True, **packing), x.dtype)


@REGISTRY.lower(quantized.quantized_embedding)
def quantized_embedding(P: Lowering, indices, w, scales, biases, dtype, **packing):
    index = indices if indices.ndim else P.emit(ir.ExpandDimsNode, x=indices, axis=0)
    w, scales, biases = (
        None if t is None else P.emit(ir.TakeNode, x=t, index=index, axis=0)
        for t in (packed_words(P, w), scales, biases)
    )
    # MLX dequantizes to the dtype of the scales. If the scales are bytes (mxfp4, mxfp8 and nvfp4), MLX dequantizes to
    # bfloat16, which holds every such value exactly.
    if scales.dtype.is_floating_point:
        # With half-precision scales, MLX would round q * scale before it adds the bias. The scales and biases are cast
        # after the rows are looked up, so that a tied output projection can use the same constants.
        scales, biases = P.cast(scales, torch.float32), P.cast(biases, torch.float32)
    y = P.emit(ir.DequantizeNode, w=w, scales=scales, biases=biases, **packing)
    y = y if indices.ndim else P.emit(ir.SqueezeNode, x=y, dims=[0])
    return P.cast(y, dtype)


def _operands(P: Lowering, x, w, scales, biases):
    """Return the fields `x`, `w`, `scales` and `biases` of a product, whose result has the dtype of `x`.

    Floating-point scales and biases are cast to the dtype of `x`. If that would round them, `x` becomes float32
    instead, for the reason that `affine_product_dtype` gives, and they keep their dtype. With an `x` of float32, MLX
    promotes scales and biases in half precision, and the CPU kernel can read them. Raises `Unsupported` if `w` is not a
    constant.
    """
    floats = [t for t in (scales, biases) if t is not None and t.dtype.is_floating_point]
    if not all(_can_cast(t, x.dtype) for t in floats):
        x = P.cast(x, torch.float32)
    scales, biases = (_cast_constant(P, t, x.dtype) if t in floats else t for t in (scales, biases))
    return {"x": x, "w": packed_words(P, w), "scales": scales, "biases": biases}


def _can_cast(t, dtype):
    """Whether a cast to `dtype` keeps all values of `t`."""
    return can_represent(dtype, t.dtype) or (t.space == Space.CONSTANT and holds(dtype, t.data))


def _cast_constant(P: Lowering, t, dtype):
    """Return `t` itself if `dtype` is float32, else the constant `t` as `dtype`, which is cast at serialization."""
    if dtype in (torch.float32, t.dtype):
        return t
    return P.constant(t.name, lambda: t.data().to(dtype), t.shape, dtype)


@REGISTRY.lower(torch.ops.torchao.dequantize_affine.default)
def dequantize_affine(P: Lowering, input, block_size, scale, zero_point, output_dtype, **integer_range):
    weight = read_affine(P, input, block_size, scale, zero_point, output_dtype=output_dtype, **integer_range)
    if weight is not None and weight.can_pack:
        return dequantize(P, weight)
    dtype = torch_dtype(output_dtype)
    if input.dtype.is_floating_point:
        raise Unsupported(f"input: got {input.dtype}, expected an integer dtype")
    if not all(isinstance(n, int) for n in block_size):
        raise Unsupported("block_size: got a dynamic size, expected integers")

    def dequantize_blocks(q, scale, zero_point=None):
        blocks, per_block = [], []
        for extent, block in zip(q.shape, block_size):
            blocks += [extent // block, block]
            per_block += [extent // block, 1]
        x = q.reshape(blocks).to(torch.int32)
        if zero_point is not None:
            x = x - zero_point.to(torch.int32).reshape(per_block)
        return (x.to(dtype) * scale.reshape(per_block)).to(dtype).reshape(q.shape)

    operands = [input, scale] + ([] if zero_point is None else [zero_point])
    return P.trace(dequantize_blocks, *operands)[0]


def _dequantize_constant(read):
    """Return a handler that dequantizes a constant weight.

    `read` takes the operator's arguments and returns a description of the weight: its values, scales and blocks. It
    returns None if the arguments do not fit this description.
    """

    def lower(P: Lowering, **arguments):
        weight = read(P, **arguments)
        if weight is None or not weight.can_pack:
            raise Unsupported("the weight is not a constant, or MLX has no packing for its block size and element type")
        return dequantize(P, weight)

    return lower


# 8-bit floats. MLX has no dtype for them, but the handlers read their bytes.
REGISTRY.hidden |= dict.fromkeys(DEQUANTIZE, (torch.float8_e4m3fn, torch.float8_e8m0fnu))

for _target, _read in DEQUANTIZE.items():
    if _read in (read_int4, read_mx, read_nvfp4):
        REGISTRY.add(_target, _dequantize_constant(_read))


# The dynamic quantization of activations uses these operators. torchao's own definitions of them are traced.
for _target in (torch.ops.torchao.choose_qparams_affine.default, torch.ops.torchao.quantize_affine.default):
    REGISTRY.add(_target, tracing_handler(_target, _target))


# PT2E writes a quantized model with the operators of `quantized_decomposed`.


@REGISTRY.lower(*(f"quantized_decomposed.quantize_per_tensor.{kind}" for kind in ("default", "tensor")))
def quantize_per_tensor(P: Lowering, input, scale, zero_point, quant_min, quant_max, dtype):
    return P.trace(_quantize, input, scale, zero_point, None, quant_min, quant_max, dtype)[0]


@REGISTRY.lower("quantized_decomposed.quantize_per_channel.default")
def quantize_per_channel(P: Lowering, input, scales, zero_points, axis, quant_min, quant_max, dtype):
    return P.trace(_quantize, input, scales, zero_points, axis, quant_min, quant_max, dtype)[0]


@REGISTRY.lower(*(f"quantized_decomposed.dequantize_per_tensor.{kind}" for kind in ("default", "tensor")))
def dequantize_per_tensor(P: Lowering, input, scale, zero_point, out_dtype, **ignored):
    if not hasattr(scale, "dtype"):
        weight = read_per_tensor(P, input, scale, zero_point, out_dtype=out_dtype, **ignored)
        if weight is not None and weight.can_pack:
            return dequantize(P, weight)
    return P.trace(_dequantize, input, scale, zero_point, None, out_dtype)[0]


@REGISTRY.lower("quantized_decomposed.dequantize_per_channel.default")
def dequantize_per_channel(P: Lowering, input, scales, zero_points, axis, out_dtype, **ignored):
    weight = read_per_channel(P, input, scales, zero_points, axis, out_dtype=out_dtype, **ignored)
    if weight is not None and weight.can_pack:
        return dequantize(P, weight)
    return P.trace(_dequantize, input, scales, zero_points, axis, out_dtype)[0]


def _quantize(x, scale, zero_point, axis, low, high, dtype):
    scale, zero_point = (_along(v, x, axis) for v in (scale, zero_point))
    return torch.clamp(torch.round(x.float() * (1.0 / scale)) + zero_point, low, high).to(dtype)


def _dequantize(q, scale, zero_point, axis, out_dtype):
    scale, zero_point = (_along(v, q, axis) for v in (scale, zero_point))
    x = q.to(torch.int32) if zero_point is None else q.to(torch.int32) - zero_point
    return (x.to(torch.float32) * scale).to(out_dtype or torch.float32)


def _fake_quantize_per_tensor(x, scale, zero_point, low, high):
    return _fake_quantize(x, scale, zero_point, None, low, high)


def _fake_quantize(x, scale, zero_point, axis, low, high):
    """Round `x` to integers and back, as a model does that is prepared for quantization-aware training."""
    scale, zero_point = (_along(v, x, axis) for v in (scale, zero_point))
    q = torch.clamp(torch.round(x.float() * (1.0 / scale) + zero_point), low, high)
    return ((q - zero_point) * scale).to(x.dtype)


REGISTRY.decompose(aten.fake_quantize_per_tensor_affine.default, _fake_quantize_per_tensor)
REGISTRY.decompose(aten.fake_quantize_per_tensor_affine.tensor_qparams, _fake_quantize_per_tensor)
REGISTRY.decompose(aten.fake_quantize_per_channel_affine.default, _fake_quantize)


def _along(values, x, axis):
    """Reshape a tensor of one element, or of one for each index of `axis`, to broadcast against `x`.

    Returns `values` itself if it is a number or None.
    """
    if not isinstance(values, torch.Tensor):
        return values
    return values.reshape(() if axis is None else [-1 if a == axis % x.ndim else 1 for a in range(x.ndim)])


# The number of products of a 4-bit and an 8-bit integer whose sum is exact in float32: 8192 * 15 * 128 < 2^24.
_EXACT_PRODUCTS = 8192


@REGISTRY.lower(aten._int_mm.default)
def int_mm(P: Lowering, self, mat2):
    """Lower an integer product to two float32 products: one with the lower and one with the upper four bits of `self`.

    A sum of more than `_EXACT_PRODUCTS` products is divided into sums that are exact.
    """
    length = self.shape[1]
    if not isinstance(length, int):
        raise Unsupported("the length of the sums is dynamic")

    def exact_product(a, b):
        low = torch.bitwise_and(a, 15)
        high = ((a - low) // 16).to(torch.float32)
        return (high @ b).to(torch.int32) * 16 + (low.to(torch.float32) @ b).to(torch.int32)

    def product(a, b):
        a, b = a.to(torch.int32), b.to(torch.float32)
        return sum(
            exact_product(a[:, k : k + _EXACT_PRODUCTS], b[k : k + _EXACT_PRODUCTS])
            for k in range(0, length, _EXACT_PRODUCTS)
        )

    return P.trace(product, self, mat2)[0]
