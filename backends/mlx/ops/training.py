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


def _register(op, node: type[ir.Op], definition) -> None:
    """Lower `op` to `node`, whose fields have the names of its arguments and whose portable form is `definition`."""
    names = [argument.name for argument in op._schema.arguments]

    @REGISTRY.lower(op)
    def lower(P: Lowering, **operands):
        return P.emit(node, **operands)

    @REGISTRY.form(node, always=True)
    def form(P: Lowering, n, env):
        return P.trace(definition, *(getattr(n, name) for name in names))


_register(training.rms_norm_gradient, ir.RMSNormGradientNode, training.rms_norm_gradient_definition)
_register(training.silu_gradient, ir.SiluGradientNode, training.silu_gradient_definition)
_register(training.cross_entropy, ir.CrossEntropyNode, training.cross_entropy_definition)
_register(training.cross_entropy_gradient, ir.CrossEntropyGradientNode, training.cross_entropy_gradient_definition)
