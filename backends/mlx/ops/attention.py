"""Scaled dot-product attention, on MLX's fused kernel."""

from __future__ import annotations

import math

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    P, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False,
):
    if dropout_p:
        raise Unsupported(f"attention with dropout_p={dropout_p}")
    if query.ndim not in (3, 4):
        raise Unsupported(f"attention over {query.ndim}-d tensors: MLX takes 3 or 4")
    if query.ndim == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
        raise Unsupported("attention with fewer key heads than query heads, but not enable_gqa")
    causal = is_causal
    if is_causal and query.shape[-2] != key.shape[-2]:
        # torch aligns the mask to the upper left, MLX to the lower right.
        attn_mask, causal = _upper_left_mask(P, query, key), False
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = P.cast(attn_mask, query.dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = query, key, value
    if query.ndim == 3:
        q, k, v = (P.emit(ir.ExpandDimsNode, x=t, axis=1) for t in (q, k, v))
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = P.emit(ir.ExpandDimsNode, x=attn_mask, axis=1)
    out = P.emit(ir.SdpaNode, q=q, k=k, v=v, scale=scale, mask=attn_mask, causal=causal)
    return P.emit(ir.SqueezeNode, x=out, dims=[1]) if query.ndim == 3 else out


def _upper_left_mask(P, query, key):
    rows, columns = P.size(query, query.ndim - 2), P.size(key, key.ndim - 2)
    mask = P.emit(ir.TriNode, n=rows, m=columns, scalar_type=11, dtype=torch.bool)
    mask.shape = (query.shape[-2], key.shape[-2])
    return mask


