"""Grouped-query attention: passes the keys and values to `SdpaNode` without a copy for each query head."""

from __future__ import annotations

from torch.fx import Node

from ..builder.bind import bind_arguments
from ..builder.lowering import Lowering
from ..builder.matcher import UNSQUEEZES, Match, Matcher, NoMatch, attempt, extents, is_call
from ..builder.registry import REGISTRY

_SDPA = "aten.scaled_dot_product_attention.default"
_EXPAND = ("aten.expand_copy.default", "aten.expand.default")
_VIEW = ("aten.view_copy.default", "aten.view.default", "aten._unsafe_view.default")
_CLONE = ("dim_order_ops._clone_dim_order.default", "aten.clone.default")


def _repeated(m: Matcher, node: Node) -> Node:
    """Match view(expand(unsqueeze(x, 2)), [B, heads, S, D]), which repeats each head of x. Returns x."""
    source = m.call(node, *_VIEW).args[0]
    if is_call(source, *_CLONE):
        source = m.call(source, *_CLONE).args[0]
    expanded = m.call(source, *_EXPAND)
    x, axis = m.call(expanded.args[0], *UNSQUEEZES).args
    if axis not in (2, -3) or len(extents(x)) != 4 or len(extents(node)) != 4:
        raise NoMatch
    batch, heads, *rest = extents(x)
    if extents(expanded) != [batch, heads, extents(expanded)[2], *rest]:  # another axis of extent 1 is expanded
        raise NoMatch
    if extents(node) != [batch, extents(node)[1], *rest]:
        raise NoMatch
    return x


def _grouped_attention(P: Lowering, node: Node) -> Match:
    m = Matcher(P)
    query, key, value = m.call(node, _SDPA).args[:3]
    grouped = {key: _repeated(m, key), value: _repeated(m, value)}
    if len({extents(x)[1] for x in grouped.values()}) != 1:
        raise NoMatch
    # A single query head attends to the heads of all groups. The repeated keys and values may have no other use.
    if extents(query)[1] == 1 or any(n in grouped for n in (query, *node.args[3:], *node.kwargs.values())):
        raise NoMatch

    def lower(P: Lowering, last):
        arguments = bind_arguments(last, lambda n: P.value(grouped.get(n, n)))
        return P.registry.handler_for(last.target)(P, **arguments | {"enable_gqa": True})

    return m.finish(node, lower)


REGISTRY.pattern(attempt(_grouped_attention))
