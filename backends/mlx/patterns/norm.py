"""RMSNorm and LayerNorm written as arithmetic, fused to `RMSNormNode` and `LayerNormNode`.

    RMSNorm:   x * rsqrt(mean(x²) + eps), optionally times a weight
    LayerNorm: (x - mean) / sqrt(variance + eps), optionally times a weight, plus a bias

In both cases, the model may cast x to float32, compute the norm in float32 and cast the result back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from ..builder.lowering import Lowering
from ..builder.matcher import Match, Matcher, NoMatch, attempt, extents, is_call, is_last_axis, tensor
from ..builder.peephole import can_represent
from ..builder.registry import REGISTRY
from ..serialization import ir

_MUL = ("aten.mul.Tensor",)
_ADD = ("aten.add.Tensor", "aten.add.Scalar")
_POW = ("aten.pow.Tensor_Scalar",)


def _normalized(m: Matcher, node, out: torch.dtype) -> tuple[Node, float]:
    """Match x * rsqrt(mean(x * x, -1) + eps), possibly cast to `out`. Returns (x, eps)."""
    node = m.before_casts(node, _skippable_after_norm(out))
    for x, scale in m.commuted(node, *_MUL):
        if is_call(scale, "aten.rsqrt.default"):
            break
    else:
        raise NoMatch
    (total,) = m.arguments(scale, ["aten.rsqrt.default"], "self")
    for mean, eps in m.commuted(total, *_ADD):
        if is_call(mean, "aten.mean.dim"):
            break
    else:
        raise NoMatch
    if _squared(m, _operand_of_mean(m, mean)) is not x:
        raise NoMatch
    return x, m.number(eps)


def _squared(m: Matcher, node) -> Node:
    """Match x², computed in the dtype of x. Returns x."""
    if is_call(node, *_POW):
        x, exponent = m.arguments(node, _POW, "self", "exponent")
        is_square = exponent == 2
    elif is_call(node, "aten.square.default"):
        (x,) = m.arguments(node, ["aten.square.default"], "self")
        is_square = True
    else:
        x, other = m.arguments(node, _MUL, "self", "other")
        is_square = x is other
    if not is_square or tensor(x).dtype != tensor(node).dtype:
        raise NoMatch
    return x


def _rms_norm(P: Lowering, node: Node) -> Match:
    out = tensor(node).dtype
    m = Matcher(P)
    weight = None
    try:
        source, eps = _normalized(m, node, out)
    except NoMatch:
        m = Matcher(P)
        weight, rest = _split_weight(m, node, node, *_MUL)
        source, eps = _normalized(m, rest, out)
    x = _before_cast(m, source, out)
    _check_result(node, x, weight)

    def lower(P: Lowering, last):
        w = None if weight is None else P.value(weight)
        return P.emit(ir.RMSNormNode, x=P.value(x), weight=w, eps=eps)

    return m.finish(node, lower)


def _is_weight(weight, node) -> bool:
    """Whether `weight` is a vector with one element for each element of the last axis of `node`."""
    value = weight.meta.get("val") if isinstance(weight, Node) else None
    return isinstance(value, torch.Tensor) and extents(weight) == extents(node)[-1:]


def _skippable_after_norm(out: torch.dtype) -> Callable[[torch.dtype, torch.dtype], bool]:
    """Return the predicate for `Matcher.before_casts` that tells which casts after a norm may be skipped.

    These are casts to `out`, and casts to wider float dtypes. A cast to a wider dtype loses nothing that a later cast
    to `out` would keep.
    """
    return lambda source, target: source.is_floating_point and target.is_floating_point and can_represent(target, out)


def _before_cast(m: Matcher, source: Node, out: torch.dtype) -> Node:
    """Skip the casts to float32 before the norm. Returns their operand, or `source` if the casts have to stay.

    MLX's kernels compute in float32 for every dtype. The casts are therefore redundant if their operand has the dtype
    of the result. They have to stay if a node outside the match uses them. Skipped casts are added to the match.
    """
    casts = Matcher(m.P)
    try:
        x = casts.before_casts(source, lambda before, after: before.is_floating_point and can_represent(after, before))
    except NoMatch:
        return source
    inside = {*m.nodes, *casts.nodes}
    if tensor(source).dtype != torch.float32 or tensor(x).dtype != out:
        return source
    if any(user not in inside for cast in casts.nodes for user in cast.users):
        return source
    m.nodes += casts.nodes
    return x


def _check_result(node: Node, x: Node, *weights: Node | None) -> None:
    """Raise NoMatch unless torch's result, the value of `node`, has the shape and dtype of `x`, which is not 0-d.

    The result of the fused instruction always has the shape and dtype of `x`.
    """
    out = tensor(node).dtype
    if tensor(x).dtype != out or not out.is_floating_point or extents(node) != extents(x) or not extents(x):
        raise NoMatch
    for weight in weights:
        if weight is not None and torch.promote_types(tensor(weight).dtype, out) != out:
            raise NoMatch


def _operand_of_mean(m: Matcher, node) -> Node:
    """Match mean(y, -1, keepdim=True). Returns y."""
    y, dim, keepdim = m.arguments(node, ["aten.mean.dim"], "self", "dim", "keepdim")
    if not keepdim or not is_last_axis(dim, y):
        raise NoMatch
    return y


def _centered(m: Matcher, node) -> Node:
    """Match x - mean(x). Returns x."""
    x, mean = m.arguments(node, ["aten.sub.Tensor"], "self", "other")
    if _operand_of_mean(m, mean) is not x:
        raise NoMatch
    return x


def _require_variance(m: Matcher, node, x: Node) -> None:
    """Raise NoMatch unless `node` is the population variance of `x` over the last axis.

    The variance is a call of `var`, or the mean of the squares of x - mean(x).
    """
    if is_call(node, "aten.var.correction"):
        source, *flags = m.arguments(node, ["aten.var.correction"], "self", "dim", "correction", "keepdim")
        dim, correction, keepdim = flags
        if source is not x or dim is None or not is_last_axis(dim, x) or correction != 0 or not keepdim:
            raise NoMatch
        return
    if _centered(m, _squared(m, _operand_of_mean(m, node))) is not x:
        raise NoMatch


def _standardized(m: Matcher, node, out: torch.dtype) -> tuple[Node, float]:
    """Match (x - mean) / sqrt(variance + eps), or the same with rsqrt, possibly cast to `out`. Returns (x, eps)."""
    node = m.before_casts(node, _skippable_after_norm(out))
    if is_call(node, "aten.div.Tensor"):
        centered, root = m.arguments(node, ["aten.div.Tensor"], "self", "other")
        (total,) = m.arguments(root, ["aten.sqrt.default"], "self")
    else:
        for centered, root in m.commuted(node, *_MUL):
            if is_call(root, "aten.rsqrt.default"):
                break
        (total,) = m.arguments(root, ["aten.rsqrt.default"], "self")
    x = _centered(m, centered)
    for variance, eps in m.commuted(total, *_ADD):
        if is_call(variance, "aten.mean.dim", "aten.var.correction"):
            _require_variance(m, variance, x)
            return x, m.number(eps)
    raise NoMatch


def _layer_norm(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    bias = weight = None
    rest = node
    if is_call(rest, "aten.add.Tensor"):
        bias, rest = _split_weight(m, rest, node, "aten.add.Tensor")
    if is_call(rest, *_MUL) and any(_is_weight(a, node) for a in Matcher(P).arguments(rest, _MUL, "self", "other")):
        weight, rest = _split_weight(m, rest, node, *_MUL)
    source, eps = _standardized(m, rest, tensor(node).dtype)
    x = _before_cast(m, source, tensor(node).dtype)
    _check_result(node, x, weight, bias)

    def lower(P: Lowering, last):
        w, b = (None if n is None else P.value(n) for n in (weight, bias))
        return P.emit(ir.LayerNormNode, x=P.value(x), weight=w, bias=b, eps=eps)

    return m.finish(node, lower)


def _split_weight(m: Matcher, node, result: Node, *targets: str) -> tuple[Node, Node]:
    """Match a commutative call in which one operand is a weight. Returns the weight and the other operand.

    A weight is a vector with the length of the last axis of `result`, the last node of the pattern.
    """
    for weight, rest in m.commuted(node, *targets):
        if _is_weight(weight, result):
            return weight, rest
    raise NoMatch


REGISTRY.pattern(attempt(_rms_norm))
REGISTRY.pattern(attempt(_layer_norm))
