"""Lowers the operators of `custom_ops/training.py`.

The nodes of gradients and of the cross-entropy have portable forms, the definitions of the operators. CPUs run the
forms, and GPUs the nodes.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY
from ..custom_ops import training
from ..extents import is_same_shape
from ..serialization import ir

REGISTRY.decompose(training.attention, training.attention_definition)


@REGISTRY.lower(training.attention_gradients)
def lower_attention_gradients(P: Lowering, grad, query, key, value, mask, is_causal, scale):
    if is_causal and not is_same_shape([query.shape[-2]], [key.shape[-2]]):  # MLX aligns the mask to the lower right
        return P.trace(training.attention_gradients_definition, grad, query, key, value, mask, is_causal, scale)
    if mask is not None:
        (mask,) = P.trace(_finite_mask, mask, query)
    outs = [P.fresh(v) for v in P.out]
    names = ("out_q", "out_k", "out_v")
    operands = {"grad": grad, "q": query, "k": key, "v": value, "mask": mask} | dict(zip(names, outs))
    P.emit(ir.SdpaGradientsNode, **operands, scale=scale, causal=is_causal)
    return outs


def _finite_mask(mask, query):
    """Return a float mask without infinities: no result for a query that sees no key is NaN."""
    lowest = torch.finfo(query.dtype).min
    if mask.dtype == torch.bool:
        return torch.where(mask, torch.zeros((), dtype=query.dtype), lowest)
    return mask.to(query.dtype).clamp(min=lowest)


@REGISTRY.form(ir.SdpaGradientsNode, always=True)
def _sdpa_gradients(P: Lowering, n, env):
    function = training.attention_gradients_definition
    return P.trace(function, n.grad, n.q, n.k, n.v, n.mask, n.causal, n.scale)


@REGISTRY.lower(training.rms_norm)
def lower_rms_norm(P: Lowering, x, weight, eps):
    return P.emit(ir.RMSNormNode, x=x, weight=weight, eps=eps)


@REGISTRY.lower(training.rms_norm_gradient)
def lower_rms_norm_gradient(P: Lowering, grad, x, eps):
    return P.emit(ir.RMSNormGradientNode, grad=grad, x=x, eps=eps)


@REGISTRY.form(ir.RMSNormGradientNode, always=True)
def _rms_norm_gradient(P: Lowering, n, env):
    return P.trace(training.rms_norm_gradient_definition, n.grad, n.x, n.eps)


@REGISTRY.lower(training.silu_gradient)
def lower_silu_gradient(P: Lowering, grad, x):
    return P.emit(ir.SiluGradientNode, grad=grad, x=x)


@REGISTRY.form(ir.SiluGradientNode, always=True)
def _silu_gradient(P: Lowering, n, env):
    return P.trace(training.silu_gradient_definition, n.grad, n.x)


@REGISTRY.lower(training.cross_entropy)
def lower_cross_entropy(P: Lowering, logits, targets):
    return P.emit(ir.CrossEntropyNode, logits=logits, targets=targets)


@REGISTRY.form(ir.CrossEntropyNode, always=True)
def _cross_entropy(P: Lowering, n, env):
    return P.trace(training.cross_entropy_definition, n.logits, n.targets)


@REGISTRY.lower(training.cross_entropy_gradient)
def lower_cross_entropy_gradient(P: Lowering, grad, logits, targets):
    return P.emit(ir.CrossEntropyGradientNode, grad=grad, logits=logits, targets=targets)


@REGISTRY.form(ir.CrossEntropyGradientNode, always=True)
def _cross_entropy_gradient(P: Lowering, n, env):
    return P.trace(training.cross_entropy_gradient_definition, n.grad, n.logits, n.targets)
