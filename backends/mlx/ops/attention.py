"""Lowers `scaled_dot_product_attention` to `SdpaNode`, MLX's fused kernel."""

from __future__ import annotations

import math

import torch

from ..builder import dtypes
from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..extents import expressions, is_same_shape
from ..serialization import ir

aten = torch.ops.aten


@REGISTRY.lower(aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(
    P: Lowering, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
):
    if dropout_p:
        raise Unsupported(f"dropout_p: got {dropout_p}, expected 0; call model.eval() before export")
    if query.ndim not in (3, 4):
        raise Unsupported(f"query: got {query.ndim} dimensions, expected 3 or 4; reshape to [B, heads, S, D]")
    if attn_mask is not None and attn_mask.ndim == 0:
        raise Unsupported("attn_mask: got 0 dimensions, expected at least 1; reshape it to [1, 1]")
    if attn_mask is not None and _masks_nothing(P, attn_mask):
        attn_mask = None
    heads_axis = query.ndim - 3
    if query.ndim == 4:
        query, key, value = _broadcast(P, 0, query, key, value)
    if enable_gqa:
        key, value = _same_heads(P, heads_axis, query, key, value)
    else:
        query, key, value = _broadcast(P, heads_axis, query, key, value)
        heads, key_heads = query.shape[heads_axis], key.shape[heads_axis]
        if not is_same_shape([heads], [key_heads]):
            raise Unsupported(
                f"got {heads} query heads and {key_heads} key heads; pass enable_gqa=True for grouped heads"
            )
    causal, has_mask = is_causal, attn_mask is not None
    if is_causal and not is_same_shape([query.shape[-2]], [key.shape[-2]]):
        # torch aligns the causal mask to the upper left corner, MLX to the lower right.
        attn_mask, causal = _upper_left_mask(P, query, key), False
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = P.cast(attn_mask, query.dtype)
    if scale is None and not isinstance(query.shape[-1], int):  # a square root at export would make the size static
        (query,), scale = P.trace(_scaled_query, query), 1.0
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    q, k, v = query, key, value
    if query.ndim == 3:
        q, k, v = (P.emit(ir.ExpandDimsNode, x=t, axis=0) for t in (q, k, v))
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = P.emit(ir.ExpandDimsNode, x=attn_mask, axis=0)
    out = P.emit(ir.SdpaNode, q=q, k=k, v=v, scale=scale, mask=attn_mask, causal=causal)
    if has_mask:
        out = _zero_masked_queries(P, out, attn_mask)
    return P.emit(ir.SqueezeNode, x=out, dims=[0]) if query.ndim == 3 else out


def _masks_nothing(P: Lowering, mask) -> bool:
    """Whether every query attends to all keys, as in the masks that encoders make for inputs without padding."""
    elements = P.known_elements(mask)
    if elements is None or elements.numel() == 0:
        return False
    return bool((elements if elements.dtype == torch.bool else elements == 0).all())


def _scaled_query(query):
    return query * torch.rsqrt(torch.full((), query.shape[-1], dtype=torch.float32)).to(query.dtype)


def _broadcast(P: Lowering, axis, *tensors):
    """Broadcast the tensors along one axis, as torch does: an extent of 1 becomes the extent of the other tensors."""
    narrow = [t for t in tensors if expressions(t.shape)[axis] == 1]
    wide = next((t for t in tensors if t not in narrow), None)
    if wide is None or not narrow:
        return tensors
    extents: list = [-1] * wide.ndim
    extents[axis] = P.size(wide, axis)
    return [P.emit(ir.BroadcastToNode, x=t, shape=extents) if t in narrow else t for t in tensors]


def _same_heads(P: Lowering, axis, query, key, value):
    """Return keys and values with the same number of heads.

    If the numbers differ, repeats each head for all query heads that share it.
    """
    if is_same_shape([key.shape[axis]], [value.shape[axis]]):
        return key, value
    if not all(isinstance(t.shape[axis], int) for t in (query, key, value)):
        raise Unsupported("dynamic numbers of heads that differ for keys and values are unsupported")

    def repeated(t):
        return P.emit(ir.RepeatNode, x=t, repeats=query.shape[axis] // t.shape[axis], axis=axis)

    return repeated(key), repeated(value)


def _upper_left_mask(P: Lowering, query, key):
    """Emit the causal mask that torch uses: query i attends to the keys 0 … i."""
    queries, keys = P.size(query, query.ndim - 2), P.size(key, key.ndim - 2)
    return P.emit(ir.TriNode, n=queries, m=keys, scalar_type=dtypes.scalar_type(torch.bool))


def _zero_masked_queries(P: Lowering, out, mask):
    """Set to zero the result of each query whose keys are all masked, as torch does.

    MLX's result for such a query is the mean of the values, or NaN.
    """
    if mask.dtype == torch.bool:
        attends = P.emit(ir.AnyNode, x=mask, axes=[-1], keepdims=True)
    else:
        highest = P.emit(ir.MaxNode, x=mask, axes=[-1], keepdims=True)
        attends = P.emit(ir.GreaterNode, a=highest, b=P.scalar(-math.inf, mask.dtype))
    return P.emit(ir.WhereNode, condition=attends, x=out, y=P.scalar(0.0, out.dtype))
