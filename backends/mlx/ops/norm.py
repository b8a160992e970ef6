"""Normalization and norms.

`rms_norm` and `layer_norm` are lowered to MLX's fused nodes. Batch norm, group norm, vector norms and cdist are lowered
to arithmetic. `patterns/norm.py` finds RMSNorm and LayerNorm in models that compute them step by step.
"""

from __future__ import annotations

import torch

from ..builder.lowering import Lowering
from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir

aten = torch.ops.aten


def _check_one_axis(normalized_shape) -> None:
    if len(normalized_shape) != 1:
        raise Unsupported(f"normalized_shape: got {len(normalized_shape)} axes, expected one; flatten them first")


@REGISTRY.lower(aten.rms_norm.default)
def rms_norm(P: Lowering, input, normalized_shape, weight=None, eps=None):
    _check_one_axis(normalized_shape)
    # torch computes half precision in float32, and its default is the epsilon of that dtype.
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return P.emit(ir.RMSNormNode, x=input, weight=weight, eps=eps)


@REGISTRY.lower(aten.layer_norm.default)
def layer_norm(P: Lowering, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    _check_one_axis(normalized_shape)
    if weight is not None and bias is None:
        # torch adds 0 where there is no bias, which turns -0 into 0. A division by the result depends on the sign.
        bias = P.constant("layer_norm_bias", torch.zeros(normalized_shape, dtype=input.dtype))
    return P.emit(ir.LayerNormNode, x=input, weight=weight, bias=bias, eps=eps)


def _batch_norm(x, weight, bias, mean, variance, eps):
    """Normalize `x` with the given statistics of each channel. The second axis of `x` is the axis of the channels.

    The arithmetic is in float32: the difference of two large products would be lost in half precision.
    """
    x, weight, bias, mean, variance = (None if t is None else t.float() for t in (x, weight, bias, mean, variance))
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = torch.rsqrt(variance + eps)
    scale = scale if weight is None else scale * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return x * scale.reshape(shape) + shift.reshape(shape)


@REGISTRY.lower(aten._native_batch_norm_legit_no_training.default)
def batch_norm(P: Lowering, input, weight, bias, running_mean, running_var, momentum, eps):
    (out,) = P.trace(_batch_norm, input, weight, bias, running_mean, running_var, eps)
    # The other results are the saved statistics, which serve training. In inference, torch returns them empty.
    return [P.cast(out, input.dtype), *(P.full([0], 0, v.dtype) for v in P.out[1:])]


def _group_norm(x, weight, bias, channels, group, eps):
    grouped = x.unflatten(1, (group, -1)).flatten(2).float()
    variance, mean = torch.var_mean(grouped, dim=-1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    out = ((grouped - mean) * scale).reshape(x.shape)
    shape = [1, channels] + [1] * (x.dim() - 2)
    out = out if weight is None else out * weight.reshape(shape)
    out = out if bias is None else out + bias.reshape(shape)
    return out.to(x.dtype), mean.squeeze(-1).to(x.dtype), scale.squeeze(-1).to(x.dtype)


@REGISTRY.lower(aten.native_group_norm.default)
def group_norm(P: Lowering, input, weight, bias, N, C, HxW, group, eps):
    return P.trace(_group_norm, input, weight, bias, C, group, eps)


def _vector_norm(x, ord, axes, keepdim, dtype):
    # In float16, the square of a number from 256 on overflows. In bfloat16, a long sum would lose its small terms.
    if dtype in (torch.float16, torch.bfloat16):
        return _vector_norm(x.to(dtype), ord, axes, keepdim, torch.float32).to(dtype)
    x = x.to(dtype).abs()
    if ord == torch.inf:
        return x.amax(axes, keepdim)
    if ord == -torch.inf:
        return x.amin(axes, keepdim)
    if ord == 0:
        return (x != 0).to(dtype).sum(axes, keepdim)
    if ord == 1:
        return x.sum(axes, keepdim)
    if ord == 2:
        return (x * x).sum(axes, keepdim).sqrt()
    return x.pow(ord).sum(axes, keepdim).pow(1 / ord)


@REGISTRY.lower(aten.linalg_vector_norm.default)
def linalg_vector_norm(P: Lowering, self, ord, dim=None, keepdim=False, dtype=None):
    axes = list(range(self.ndim)) if dim is None else dim
    return P.trace(_vector_norm, self, ord, axes, keepdim, P.out.dtype)[0]


def _cdist(x1, x2, p):
    difference = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p == 0:  # the number of differences, or NaN if one of them is NaN
        return difference.ceil().clamp(max=1).sum(-1)
    return torch.linalg.vector_norm(difference, p, -1)


@REGISTRY.lower(aten._cdist_forward.default)
def cdist_forward(P: Lowering, x1, x2, p, compute_mode=None):
    return P.trace(_cdist, x1, x2, p)[0]
