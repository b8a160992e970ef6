"""Quantization as torchao spells it."""

from __future__ import annotations

import torch
from torchao.quantization import quant_primitives as _  # noqa: F401  (defines torchao's operators)

from ..builder.affine import affine, packed, result_dtype
from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir


@REGISTRY.lower(torch.ops.torchao.dequantize_affine.default)
def dequantize_affine(P, input, block_size, scale, zero_point, output_dtype, **range_):
    a = affine(input, block_size, scale, zero_point, output_dtype=output_dtype, **range_)
    if a is not None and a.packs:
        # In float32: MLX would round q * scale to a half type before it adds the bias.
        w = P.emit(ir.DequantizeNode, **packed(P, a, torch.float32), dtype=torch.float32)
        w.shape = tuple(input.shape)
        return P.cast(w, a.dtype)
    dtype = result_dtype(output_dtype)
    if input.dtype.is_floating_point:
        raise Unsupported(f"dequantize_affine of {input.dtype}: integers were expected")
    if not all(isinstance(n, int) for n in (*input.shape, *block_size)):
        raise Unsupported(f"blocks of {block_size} in a tensor of dynamic shape {list(input.shape)}")

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


@REGISTRY.lower(
    torch.ops.torchao.choose_qparams_affine.default, torch.ops.torchao.quantize_affine.default
)
def quantize(P, input, **rest):
    raise Unsupported("dynamic quantization of activations: MLX multiplies quantized weights only")
