"""view(mm(view(x, [-1, K]), w)), fused to one `AddmmNode`: MLX multiplies tensors of any rank along the last axis.

`P` is the builder, as in all patterns.
"""

from __future__ import annotations

from torch.fx import Node

from ..builder.lowering import Lowering
from ..builder.matcher import CASTS, VIEWS, Match, Matcher, NoMatch, attempt, extents, is_call, tensor
from ..builder.registry import REGISTRY
from ..serialization import ir


def _linear(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    product, _ = m.arguments(node, VIEWS, "self", "size")
    if is_call(product, "aten.addmm.default"):
        bias, flat, weight = m.arguments(product, ["aten.addmm.default"], "self", "mat1", "mat2")
    else:
        bias, (flat, weight) = None, m.arguments(product, ["aten.mm.default"], "self", "mat2")
    # The weight behind a cast may be quantized. `patterns/quant.py` matches such a product.
    if is_call(weight, *CASTS) or not tensor(flat).dtype.is_floating_point:
        raise NoMatch
    x, _ = Matcher(P).arguments(flat, VIEWS, "self", "size")  # outside of the match: the view may have other users
    if extents(x)[:-1] != extents(node)[:-1] or extents(x)[-1:] != extents(weight)[:1]:
        raise NoMatch
    if extents(node)[-1] != extents(weight)[1] or len(extents(x)) < 2:
        raise NoMatch
    if bias is not None and tensor(bias).ndim > 1:  # such a bias has the shape of the matrix product, not of the result
        raise NoMatch

    def lower(P: Lowering, last):
        added = None if bias is None else P.value(bias)
        return P.emit(ir.AddmmNode, mat1=P.value(x), mat2=P.value(weight), bias=added)

    return m.finish(node, lower, reads=(x,))


REGISTRY.pattern(attempt(_linear))
