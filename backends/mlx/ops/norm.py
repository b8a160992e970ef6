"""Normalization over the last axis."""

from __future__ import annotations

import torch

from ..builder.registry import REGISTRY, Unsupported
from ..serialization import ir

aten = torch.ops.aten


def _last_axis(name: str, normalized_shape) -> None:
    if len(normalized_shape) != 1:
        raise Unsupported(f"{name} over {len(normalized_shape)} axes: MLX normalizes the last one")


@REGISTRY.lower(aten.rms_norm.default)
def rms_norm(P, input, normalized_shape, weight=None, eps=None):
    _last_axis("rms_norm", normalized_shape)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return P.emit(ir.RMSNormNode, x=input, weight=weight, eps=eps)


@REGISTRY.lower(aten.layer_norm.default)
def layer_norm(P, input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    _last_axis("layer_norm", normalized_shape)
    return P.emit(ir.LayerNormNode, x=input, weight=weight, bias=bias, eps=eps)
