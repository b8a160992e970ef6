"""Norms as models spell them out.

RMSNorm: x * rsqrt(mean(x²) + eps), then a weight. LayerNorm: (x - mean) / sqrt(variance + eps),
then a weight and a bias.
"""

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
    x = _before_float32(m, source, node.meta["val"].dtype)
    _check_types(node, x, weight)

    def lower(P, last):
        w = None if weight is None else P.value(weight)
        return P.emit(ir.RMSNormNode, x=P.value(x), weight=w, eps=eps)

    return m.finish(node, lower)


def _weighted(m: Matcher, node) -> tuple[Node, Node, float]:
    weight, rest = _scaling(m, node, node, *_MUL)
    return weight, *_normalized(m, rest)


def _is_weight(weight, node) -> bool:
    value = weight.meta.get("val") if isinstance(weight, Node) else None
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 1
        and value.shape[0] == node.meta["val"].shape[-1]
    )


def _before_float32(m: Matcher, source: Node, out: torch.dtype) -> Node:
    """What was cast up before the norm, if that is of the type that comes out and nothing else
    reads the cast: MLX computes in float32 whatever it is given."""
    casts = Matcher(m.P)
    x = casts.uncast(source)
    inside = {*m.nodes, *casts.nodes}
    if source.meta["val"].dtype != torch.float32 or x.meta["val"].dtype != out:
        return source
    if any(user not in inside for cast in casts.nodes for user in cast.users):
        return source
    m.nodes += casts.nodes
    return x


def _check_types(node: Node, x: Node, *weights: Node | None) -> None:
    """The result is of the type of `x`, and so it is in torch."""
    out = node.meta["val"].dtype
    if x.meta["val"].dtype != out or not out.is_floating_point:
        raise NoMatch
    for weight in weights:
        if weight is not None and torch.promote_types(weight.meta["val"].dtype, out) != out:
            raise NoMatch


def _mean_of(m: Matcher, node) -> Node:
    """y of mean(y, -1, keepdim=True)."""
    y, dims, *keepdim = m.call(node, "aten.mean.dim").args[:3]
    if keepdim != [True] or list(dims) not in ([-1], [y.meta["val"].ndim - 1]):
        raise NoMatch
    return y


def _centered(m: Matcher, node) -> Node:
    """x of x - mean(x)."""
    x, mean = m.call(node, "aten.sub.Tensor").args
    if _mean_of(m, mean) is not x:
        raise NoMatch
    return x


def _variance(m: Matcher, node, x: Node) -> None:
    """The population's, of the last axis: as a function, or as the mean of squares."""
    if is_call(node, "aten.var.correction"):
        call = m.call(node, "aten.var.correction")
        source, dims = call.args
        flags = (call.kwargs.get("correction"), call.kwargs.get("keepdim"))
        if source is x and list(dims) in ([-1], [x.meta["val"].ndim - 1]) and flags == (0, True):
            return
        raise NoMatch
    square = _mean_of(m, node)
    if is_call(square, "aten.pow.Tensor_Scalar"):
        centered, power = m.call(square, "aten.pow.Tensor_Scalar").args
        factors = {centered} if power == 2 else set()
    else:
        factors = set(m.call(square, *_MUL, "aten.square.default").args)
    if len(factors) != 1 or _centered(m, factors.pop()) is not x:
        raise NoMatch


def _standardized(m: Matcher, node) -> tuple[Node, float]:
    """(x, eps) of (x - mean) / sqrt(variance + eps), in either spelling."""
    node = m.uncast(node)
    if is_call(node, "aten.div.Tensor"):
        centered, root = m.call(node, "aten.div.Tensor").args
        total = m.call(root, "aten.sqrt.default").args[0]
    else:
        for centered, root in m.commuted(node, *_MUL):
            if is_call(root, "aten.rsqrt.default"):
                break
        total = m.call(root, "aten.rsqrt.default").args[0]
    x = _centered(m, centered)
    for variance, eps in m.commuted(total, "aten.add.Tensor", "aten.add.Scalar"):
        if is_call(variance, "aten.mean.dim", "aten.var.correction"):
            _variance(m, variance, x)
            return x, m.number(eps)
    raise NoMatch


def _layer_norm(P, node: Node) -> Match:
    m = Matcher(P)
    bias = weight = None
    rest = node
    if is_call(rest, "aten.add.Tensor"):
        bias, rest = _scaling(m, rest, node, "aten.add.Tensor")
    if is_call(rest, *_MUL) and any(_is_weight(a, node) for a in rest.args):
        weight, rest = _scaling(m, rest, node, *_MUL)
    source, eps = _standardized(m, rest)
    x = _before_float32(m, source, node.meta["val"].dtype)
    _check_types(node, x, weight, bias)

    def lower(P, last):
        w, b = (None if n is None else P.value(n) for n in (weight, bias))
        return P.emit(ir.LayerNormNode, x=P.value(x), weight=w, bias=b, eps=eps)

    return m.finish(node, lower)


def _scaling(m: Matcher, node, last: Node, *targets: str) -> tuple[Node, Node]:
    """(weight, rest) of a call with a weight."""
    for weight, rest in m.commuted(node, *targets):
        if _is_weight(weight, last):
            return weight, rest
    raise NoMatch


REGISTRY.pattern(attempt(_rms_norm))
REGISTRY.pattern(attempt(_layer_norm))
