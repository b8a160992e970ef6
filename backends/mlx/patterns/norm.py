"""RMSNorm as models spell it out: x * rsqrt(mean(x²) + eps), then a weight."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..builder.patterns import Match, Matcher, NoMatch, attempt, is_call
from ..builder.registry import REGISTRY
from ..serialization import ir

_MUL = ("aten.mul.Tensor",)


def _normalized(m: Matcher, node) -> tuple[Node, float]:
    """(x, eps) of x * rsqrt(mean(x * x, -1) + eps), maybe computed in float32."""
    node = m.uncast(node)
    for x, scale in m.commuted(node, *_MUL):
        if is_call(scale, "aten.rsqrt.default"):
            break
    else:
        raise NoMatch
    total = m.call(scale, "aten.rsqrt.default").args[0]
    for mean, eps in m.commuted(total, "aten.add.Tensor", "aten.add.Scalar"):
        if is_call(mean, "aten.mean.dim"):
            break
    else:
        raise NoMatch
    square, dims, keepdim = m.call(mean, "aten.mean.dim").args[:3]
    if list(dims) != [-1] and list(dims) != [x.meta["val"].ndim - 1] or not keepdim:
        raise NoMatch
    if is_call(square, "aten.pow.Tensor_Scalar"):
        if m.call(square, "aten.pow.Tensor_Scalar").args != (x, 2):
            raise NoMatch
    elif m.call(square, *_MUL, "aten.square.default").args not in ((x, x), (x,)):
        raise NoMatch
    return x, m.number(eps)


def _rms_norm(P, node: Node) -> Match:
    m = Matcher(P)
    weight = None
    try:
        source, eps = _normalized(m, node)
    except NoMatch:
        m = Matcher(P)
        weight, source, eps = _weighted(m, node)
    x = m.uncast(source) if _only_float32(source, m) else source
    out = node.meta["val"].dtype
    if x.meta["val"].dtype != out or (weight is not None and weight.meta["val"].dtype != out):
        raise NoMatch

    def lower(P, last):
        w = None if weight is None else P.value(weight)
        return P.emit(ir.RMSNormNode, x=P.value(x), weight=w, eps=eps)

    return m.finish(node, lower)


def _weighted(m: Matcher, node) -> tuple[Node, Node, float]:
    for weight, rest in m.commuted(node, *_MUL):
        if _is_weight(weight, node):
            return weight, *_normalized(m, rest)
    raise NoMatch


def _is_weight(weight, node) -> bool:
    value = weight.meta.get("val") if isinstance(weight, Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 1
        and value.shape[0] == node.meta["val"].shape[-1]
    )


def _only_float32(source, m: Matcher) -> bool:
    """A cast up before the norm joins it if nothing else reads it."""
    return source.meta["val"].dtype == torch.float32 and all(u in m.nodes for u in source.users)


REGISTRY.pattern(attempt(_rms_norm))
