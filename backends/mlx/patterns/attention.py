"""Grouped-query attention: keys and values repeated for their query heads need no repeating."""

from __future__ import annotations

from torch.fx import Node

from ..builder.patterns import UNSQUEEZES, Match, Matcher, NoMatch, attempt, is_call
from ..builder.bind import bind_arguments
from ..builder.registry import REGISTRY

_SDPA = "aten.scaled_dot_product_attention.default"
_EXPAND = ("aten.expand_copy.default", "aten.expand.default")
_VIEW = ("aten.view_copy.default", "aten.view.default", "aten._unsafe_view.default")
_CLONE = ("dim_order_ops._clone_dim_order.default", "aten.clone.default")


def _repeated(m: Matcher, node: Node) -> Node:
    """x of view(expand(unsqueeze(x, 2)), [B, heads, S, D]): each head several times in a row."""
    source = m.call(node, *_VIEW).args[0]
    if is_call(source, *_CLONE):
        source = m.call(source, *_CLONE).args[0]
    inner = m.call(m.call(source, *_EXPAND).args[0], *UNSQUEEZES)
    x, axis = inner.args
    extents = list(x.meta["val"].shape)
    heads = node.meta["val"].shape[1]
    if axis != 2 or len(extents) != 4 or list(node.meta["val"].shape) != [
        extents[0], heads, *extents[2:]
    ]:
        raise NoMatch
    return x


def _grouped_attention(P, node: Node) -> Match:
    m = Matcher(P)
    query, key, value = m.call(node, _SDPA).args[:3]
    grouped = {key: _repeated(m, key), value: _repeated(m, value)}

    def lower(P, last):
        arguments = bind_arguments(last, lambda n: P.value(grouped.get(n, n)))
        return P.registry.find(last.target)(P, **arguments | {"enable_gqa": True})

    return m.finish(node, lower)


REGISTRY.pattern(attempt(_grouped_attention))
