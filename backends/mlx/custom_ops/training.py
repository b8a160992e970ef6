"""Torch operators with a gradient that is one operator, for training steps. They compute in float32.

Importing this module defines the operators in the operator library `mlx`.
"""

from __future__ import annotations

import torch

from .library import define, differentiate

# Attention -------------------------------------------------------------------------------


def attention_definition(query, key, value, mask, is_causal, scale):
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )


def _attention_fake(query, key, value, mask, is_causal, scale):
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


# Returns `scaled_dot_product_attention` of query [B, H, S, D], key [B, G, L, D] and value [B, G, L, V], where G divides
# H. The mask, of two to four axes, has no gradient.
attention = define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float scale) -> Tensor",
    attention_definition,
    _attention_fake,
)


def attention_gradients_definition(grad, query, key, value, mask, is_causal, scale):
    """Compute the attention again, which takes less memory than its weights would."""
    grad, q, k, v = (x.float() for x in (grad, query, key, value))
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    scores, lowest = (q * scale) @ k.mT, torch.finfo(torch.float32).min
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = torch.where(mask, scores, lowest)
    elif mask is not None:
        scores = scores + mask.float().clamp(min=lowest)  # without infinities, no query gets NaN
    weights = torch.softmax(scores, -1)
    grad_weights = weights * (grad @ v.mT)
    grad_scores = scale * (grad_weights - weights * grad_weights.sum(-1, keepdim=True))
    grad_k, grad_v = grad_scores.mT @ q, weights.mT @ grad
    if repeats > 1:
        grad_k, grad_v = (x.unflatten(1, (-1, repeats)).sum(2) for x in (grad_k, grad_v))
    return (grad_scores @ k).to(query.dtype), grad_k.to(key.dtype), grad_v.to(value.dtype)


def _attention_gradients_fake(grad, query, key, value, mask, is_causal, scale):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


# Returns the gradients of query, key and value in `attention`, from `grad`, that of the result. `grad` is zero for a
# query that sees no key.
attention_gradients = define(
    "attention_gradients(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, "
    "float scale) -> (Tensor, Tensor, Tensor)",
    attention_gradients_definition,
    _attention_gradients_fake,
)


def _save_attention(context, inputs):
    *operands, context.is_causal, context.scale = inputs
    context.save_for_backward(*operands)


def _attention_backward(context, grad):
    query, key, value, mask = context.saved_tensors
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask > -torch.inf
        grad = torch.where(allowed.any(-1, keepdim=True), grad, 0.0)
    gradients = attention_gradients(grad, query, key, value, mask, context.is_causal, context.scale)
    return *gradients, None, None, None


differentiate(attention, _attention_backward, _save_attention)

# RMSNorm ---------------------------------------------------------------------------------


def _rms_norm(x, weight, eps):
    return _normalized(x, eps).to(x.dtype) * weight


def _normalized(x, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


# Returns x [..., N] divided by its root mean square over the last axis, times weight [N], which has the dtype of x.
rms_norm = define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor", _rms_norm, lambda x, weight, eps: torch.empty_like(x)
)


def rms_norm_gradient_definition(grad, x, eps):
    grad, wide = grad.float(), x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    along = (grad * wide).mean(-1, keepdim=True) * (scale * scale)
    return (scale * (grad - wide * along)).to(x.dtype)


# Returns the gradient of x in `rms_norm` without a weight, from `grad`, that of the result.
rms_norm_gradient = define(
    "rms_norm_gradient(Tensor grad, Tensor x, float eps) -> Tensor",
    rms_norm_gradient_definition,
    lambda grad, x, eps: torch.empty_like(x),
)


def _save_norm(context, inputs):
    *operands, context.eps = inputs
    context.save_for_backward(*operands)


def _rms_norm_backward(context, grad):
    x, weight = context.saved_tensors
    grad_weight = None
    if context.needs_input_grad[1]:
        products = grad.float() * _normalized(x, context.eps)
        grad_weight = products.flatten(0, -2).sum(0).to(weight.dtype)
    return rms_norm_gradient(grad * weight, x, context.eps), grad_weight, None


differentiate(rms_norm, _rms_norm_backward, _save_norm)

# SiLU ------------------------------------------------------------------------------------


def silu_gradient_definition(grad, x):
    wide = x.float()
    share = torch.sigmoid(wide)
    return (grad.float() * share * (1 + wide * (1 - share))).to(x.dtype)


# Returns the gradient of x in `silu`, from `grad`, that of the result.
silu_gradient = define(
    "silu_gradient(Tensor grad, Tensor x) -> Tensor", silu_gradient_definition, lambda grad, x: torch.empty_like(x)
)

# Cross-entropy ---------------------------------------------------------------------------


def cross_entropy_definition(logits, targets):
    logits = logits.float()
    return torch.logsumexp(logits, -1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


# Returns -log p(target), float32 [...], for logits [..., V] and int64 targets [...].
cross_entropy = define(
    "cross_entropy(Tensor logits, Tensor targets) -> Tensor",
    cross_entropy_definition,
    lambda logits, targets: logits.new_empty(targets.shape, dtype=torch.float32),
)


def cross_entropy_gradient_definition(grad, logits, targets):
    wide, grad = logits.float(), grad.unsqueeze(-1)
    shares = torch.exp(wide - torch.logsumexp(wide, -1, keepdim=True)) * grad
    return shares.scatter_add(-1, targets.unsqueeze(-1), -grad).to(logits.dtype)


# Returns the gradient of the logits in `cross_entropy`, from `grad`, that of the result.
cross_entropy_gradient = define(
    "cross_entropy_gradient(Tensor grad, Tensor logits, Tensor targets) -> Tensor",
    cross_entropy_gradient_definition,
    lambda grad, logits, targets: torch.empty_like(logits),
)
differentiate(
    cross_entropy,
    lambda context, grad: (cross_entropy_gradient(grad, *context.saved_tensors), None),
    lambda context, inputs: context.save_for_backward(*inputs),
)
