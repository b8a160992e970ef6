"""Grouped-query attention: passes the keys and values to `SdpaNode` without a copy for each query head."""

from __future__ import annotations

from torch.fx import Node

from ..builder.bind import bind_arguments
from ..builder.lowering import Lowering
from ..builder.matcher import UNSQUEEZES, VIEWS, Match, Matcher, NoMatch, attempt, extents, is_call
from ..builder.registry import REGISTRY

_SDPA = "aten.scaled_dot_product_attention.default"
_OPTIONS = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_EXPAND = ("aten.expand_copy.default", "aten.expand.default")
_CLONE = ("dim_order_ops._clone_dim_order.default", "aten.clone.default")


def _repeated(m: Matcher, node: Node) -> Node:
    """Match view(expand(unsqueeze(x, 2)), [B, heads, S, D]), which repeats each head of x. Returns x."""
    expanded, _ = m.arguments(node, VIEWS, "self", "size")
    if is_call(expanded, *_CLONE):
        (expanded,) = m.arguments(expanded, _CLONE, "self")
    unsqueezed, _ = m.arguments(expanded, _EXPAND, "self", "size")
    x, axis = m.arguments(unsqueezed, UNSQUEEZES, "self", "dim")
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
    query, key, value, *options = m.arguments(node, [_SDPA], "query", "key", "value", *_OPTIONS)
    grouped = {key: _repeated(m, key), value: _repeated(m, value)}
    if len({extents(x)[1] for x in grouped.values()}) != 1:
        raise NoMatch
    # A single query head attends to the heads of all groups. The repeated keys and values may have no other use.
    if extents(query)[1] == 1 or any(n in grouped for n in (query, *options)):
        raise NoMatch

    def lower(P: Lowering, last):
        arguments = bind_arguments(last, lambda n: P.value(grouped.get(n, n)))
        return P.registry.handler_for(last.target)(P, **arguments | {"enable_gqa": True})

    return m.finish(node, lower)


REGISTRY.pattern(attempt(_grouped_attention))
