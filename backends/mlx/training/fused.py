"""Takes operators whose gradient is one operator, from `custom_ops/training.py`, in place of what a model calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from ..custom_ops import training
from . import losses


@contextmanager
def fused_gradients() -> Iterator[None]:
    """Let attention and the cross-entropy be such operators, which have no gradient of a gradient.

    A `TorchFunctionMode` would not do: it is not active when checkpointing computes something again.
    """
    attention, losses_of_tokens = F.scaled_dot_product_attention, losses.token_losses

    def fused_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = _attention(*args, **kwargs)
        return attention(*args, **kwargs) if result is None else result

    F.scaled_dot_product_attention, losses.token_losses = fused_attention, training.cross_entropy
    try:
        yield
    finally:
        F.scaled_dot_product_attention, losses.token_losses = attention, losses_of_tokens


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Return the result of `mlx::attention`, or None if the arguments do not fit it."""
    has_heads = all(x.ndim == 4 and x.shape[0] == query.shape[0] for x in (query, key, value))
    if not has_heads or dropout_p or len({x.dtype for x in (query, key, value)}) > 1:
        return None
    heads, shared = query.shape[1], key.shape[1]
    if value.shape[1] != shared or heads % shared or not (enable_gqa or heads == shared):
        return None
    if attn_mask is not None and (attn_mask.requires_grad or attn_mask.ndim < 2 or is_causal):
        return None
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return training.attention(query, key, value, attn_mask, is_causal, scale)


def fuse_norms(model: torch.nn.Module) -> None:
    """Let the layers of `model` that compute an RMSNorm call `mlx::rms_norm`, in place.

    These are the modules with a vector `weight` as the only tensor, a number `eps` or `variance_epsilon`, and a result
    that is that of an RMSNorm with this weight, or with 1 + weight as in Gemma, for random numbers.
    """
    for norm in model.modules():
        eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
        tensors = {**dict(norm.named_parameters()), **dict(norm.named_buffers())}
        if not isinstance(eps, float) or list(tensors) != ["weight"] or tensors["weight"].ndim != 1:
            continue
        if any(norm.children()) or len(inspect.signature(norm.forward).parameters) != 1:
            continue
        for shift in (0, 1):
            if _is_rms_norm(norm, eps, shift):
                _fuse(norm, eps, shift)
                break


def _is_rms_norm(norm: torch.nn.Module, eps: float, shift: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, norm.weight.shape[0], generator=generator) for shape in ([3], []))
    x[0] *= 0.1 * math.sqrt(eps)  # where eps matters
    with torch.no_grad():
        result = torch.func.functional_call(norm, {"weight": weight}, x)
        expected = training.rms_norm(x, weight + shift, eps)
    return result.shape == x.shape and result.dtype == x.dtype and torch.allclose(result, expected, 1e-5, 1e-5)


def _fuse(norm: torch.nn.Module, eps: float, shift: int) -> None:
    forward = norm.forward

    def fused(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != norm.weight.dtype:
            return forward(x)
        return training.rms_norm(x, norm.weight + shift if shift else norm.weight, eps)

    norm.forward = fused
