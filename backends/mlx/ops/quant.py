"""Quantized weights: in MLX's packing, and as torchao spells them."""

from __future__ import annotations

import torch
from torchao.quantization import quant_primitives as _  # noqa: F401  (defines torchao's operators)

from .. import custom_quant_ops
from ..builder.quantized import DEQUANTIZE, affine, dequantized, result_dtype
from ..builder.registry import REGISTRY, Unsupported
from ..builder.slots import Space
from ..serialization import ir


@REGISTRY.lower(custom_quant_ops.quantized_matmul)
def quantized_matmul(P, x, w, scales, biases, **form):
    w, scales, biases = _operands(P, w, scales, biases, x.dtype)
    return P.emit(ir.QuantizedMatmulNode, x=x, w=w, scales=scales, biases=biases, transpose=True, **form)


@REGISTRY.lower(custom_quant_ops.gathered_quantized_matmul)
def gathered_quantized_matmul(P, x, index, w, scales, biases, **form):
    w, scales, biases = _operands(P, w, scales, biases, x.dtype)
    return P.emit(
        ir.GatherQmmNode, x=x, w=w, scales=scales, biases=biases, rhs_indices=index,
        transpose=True, **form,
    )


@REGISTRY.lower(custom_quant_ops.quantized_embedding)
def quantized_embedding(P, indices, w, scales, biases, dtype, **form):
    index = indices if indices.ndim else P.emit(ir.ExpandDimsNode, x=indices, axis=0)
    w, scales, biases = (
        None if t is None else P.emit(ir.TakeNode, x=t, index=index, axis=0)
        for t in _operands(P, w, scales, biases)
    )
    # MLX makes floats of the dtype of the scales, and bfloat16, exactly, where those are bytes.
    if scales.dtype.is_floating_point:
        # It would round q * scale before it adds the bias. Only the rows are cast, so that the
        # tables can be those of a tied head.
        scales, biases = P.cast(scales, torch.float32), P.cast(biases, torch.float32)
    made = torch.float32 if scales.dtype.is_floating_point else torch.bfloat16
    y = P.emit(ir.DequantizeNode, w=w, scales=scales, biases=biases, dtype=made, **form)
    y = y if indices.ndim else P.emit(ir.SqueezeNode, x=y, dims=[0])
    y.shape = tuple(P.out.shape)
    return P.cast(y, dtype)


def _operands(P, w, scales, biases, dtype=None):
    """`w` in uint32, and floats among scales and biases in `dtype`: at serialization."""
    if w.space != Space.CONSTANT:
        raise Unsupported("packed weights that are not constants of the program")
    words = P.constant(w.name, lambda: w.data().view(torch.uint32), w.shape, torch.uint32)
    return words, _floats(P, scales, dtype), _floats(P, biases, dtype)


def _floats(P, t, dtype):
    if t is None or dtype in (None, t.dtype) or not t.dtype.is_floating_point:
        return t
    if t.space != Space.CONSTANT:
        return P.cast(t, dtype)
    return P.constant(t.name, lambda: t.data().to(dtype), t.shape, dtype)


@REGISTRY.lower(torch.ops.torchao.dequantize_affine.default)
def dequantize_affine(P, input, block_size, scale, zero_point, output_dtype, **range_):
    weight = affine(P, input, block_size, scale, zero_point, output_dtype=output_dtype, **range_)
    if weight is not None and weight.packs:
        return dequantized(P, weight)
    dtype = result_dtype(output_dtype)
    if input.dtype.is_floating_point:
        raise Unsupported(f"dequantize_affine of {input.dtype}: integers were expected")
    if not all(isinstance(n, int) for n in block_size):
        raise Unsupported(f"blocks of a dynamic size in a tensor of shape {list(input.shape)}")

    def text(q, scale, zero_point=None):
        blocks, inner = [], []
        for extent, block in zip(q.shape, block_size):
            blocks += [extent // block, block]
            inner += [extent // block, 1]
        x = q.reshape(blocks).to(torch.int32)
        if zero_point is not None:
            x = x - zero_point.to(torch.int32).reshape(inner)
        return (x.to(dtype) * scale.reshape(inner)).to(dtype).reshape(q.shape)

    operands = [input, scale] + ([] if zero_point is None else [zero_point])
    return P.trace(text, *operands)[0]


def _whole(read):
    """A weight that is read as a matrix of floats."""

    def lower(P, **arguments):
        weight = read(P, **arguments)
        if weight is None or not weight.packs:
            raise Unsupported("quantized weights that MLX has no packing for, or that are no constants")
        return dequantized(P, weight)

    return lower


for _target, _read in DEQUANTIZE.items():
    if _read is not affine:
        REGISTRY.add(_target, _whole(_read))


def _by_its_definition(target):
    """Dynamic quantization of activations: torchao's own text, around the product."""

    def lower(P, **arguments):
        results = P.trace(target, **arguments)
        return results if len(target._schema.returns) > 1 else results[0]

    return lower


for _target in (
    torch.ops.torchao.choose_qparams_affine.default, torch.ops.torchao.quantize_affine.default
):
    REGISTRY.add(_target, _by_its_definition(_target))


@REGISTRY.lower(torch.ops.aten._int_mm.default)
def int_mm(P, self, mat2):
    """In float32 every sum of products with half a byte is exact, up to 8192 of them."""

    def text(a, b):
        a, b = a.to(torch.int32), b.to(torch.float32)
        low = torch.bitwise_and(a, 15)
        high = ((a - low) // 16).to(torch.float32)
        return (high @ b).to(torch.int32) * 16 + (low.to(torch.float32) @ b).to(torch.int32)

    return P.trace(text, self, mat2)[0]
