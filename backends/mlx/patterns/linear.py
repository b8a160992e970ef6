"""A product between two views: MLX multiplies the last axis, whatever stands before it."""

from __future__ import annotations

from torch.fx import Node

from ..builder.patterns import CASTS, Match, Matcher, NoMatch, attempt, is_call
from ..builder.registry import REGISTRY
from ..serialization import ir

_VIEW = ("aten.view_copy.default", "aten.view.default", "aten._unsafe_view.default")


def _extents(node: Node) -> list:
    return [e if isinstance(e, int) else e.node.expr for e in node.meta["val"].shape]


def _linear(P, node: Node) -> Match:
    m = Matcher(P)
    product = m.call(m.call(node, *_VIEW).args[0], "aten.addmm.default", "aten.mm.default")
    *bias, flat, weight = product.args
    # A cast weight may be a quantized one, which has a pattern of its own.
    if not is_call(flat, *_VIEW) or is_call(weight, *CASTS) or product.kwargs:
        raise NoMatch
    x = flat.args[0]  # the view itself may have other readers
    if _extents(x)[:-1] != _extents(node)[:-1] or _extents(x)[-1] != _extents(weight)[0]:
        raise NoMatch
    if _extents(node)[-1] != _extents(weight)[1] or len(_extents(x)) < 2:
        raise NoMatch

    def lower(P, last):
        added = P.value(bias[0]) if bias else None
        return P.emit(ir.AddmmNode, mat1=P.value(x), mat2=P.value(weight), bias=added)

    return m.finish(node, lower)


REGISTRY.pattern(attempt(_linear))
