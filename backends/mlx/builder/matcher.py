"""Building blocks of patterns: a `Matcher` walks the graph backwards from a node, and a `Match` is the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .bind import PLACEMENT
from .registry import aten_target
from .slots import TensorSlot

# Targets with the same meaning, for patterns that accept any of them.
CASTS = ("aten._to_copy.default", "dim_order_ops._to_dim_order_copy.default")
UNSQUEEZES = ("aten.unsqueeze_copy.default", "aten.unsqueeze.default")


@dataclass(frozen=True)
class Match:
    """`nodes` are the FX nodes that the fusion replaces. `lower(P, last)` is its handler; `last` is the last node."""

    nodes: tuple[Node, ...]
    lower: Callable[[Any, Node], Any]


class Matcher:
    """Collects the nodes that a pattern visits. A step raises `NoMatch` if the graph does not fit.

    A pattern must prove every assumption of its fusion. `arguments` helps: an argument that the pattern does not name
    must have its default value.
    """

    def __init__(self, P: Any):
        self.P = P
        self.nodes: list[Node] = []

    def call(self, node: Any, *targets: str) -> Node:
        """`node`, which must call one of `targets`, such as "aten.mul.Tensor". It joins the match."""
        if not is_call(node, *targets):
            raise NoMatch
        if node not in self.nodes:
            self.nodes.append(node)
        return node

    def arguments(self, node: Any, targets: Iterable[str], *names: str) -> tuple[Any, ...]:
        """The arguments `names` of a call of one of `targets`, by the names in its schema.

        Arguments that are not given have their defaults. Raises `NoMatch` if an argument outside `names` has another
        value than its default, such as `alpha` of an addition.
        """
        node = self.call(node, *targets)
        bound = dict(_bound(node))
        values = tuple(bound.pop(name).value for name in names)
        if any(argument.value != argument.default for argument in bound.values()):
            raise NoMatch
        return values

    def commuted(self, node: Any, *targets: str) -> Iterable[tuple[Any, Any]]:
        """The two operands of a commutative call, in both orders."""
        a, b = self.arguments(node, targets, "self", "other")
        return (a, b), (b, a)

    def before_casts(self, node: Any, keeps: Callable[[torch.dtype, torch.dtype], bool]) -> Any:
        """The operand of the casts that end in `node`, or `node` itself. The casts join the match.

        `keeps(source, target)` says whether the pattern may ignore a cast between these dtypes.
        """
        while is_call(node, *CASTS):
            source = node.args[0]
            if not keeps(tensor(source).dtype, tensor(node).dtype):
                raise NoMatch
            node = self.call(node, *CASTS).args[0]
        return node

    def number(self, value: Any) -> float:
        """A Python number, given as it is or as the constant that export makes of it."""
        while is_call(value, *CASTS):
            value = value.args[0]
        if isinstance(value, (int, float)):
            return value
        slot = self.P.value_or_none(value)
        if isinstance(slot, TensorSlot) and slot.number is not None:
            return slot.number
        raise NoMatch

    def finish(self, last: Node, lower: Callable[[Any, Node], Any]) -> Match:
        """The match. Every node but `last` must have all of its users inside the match."""
        inside = set(self.nodes)
        for node in self.nodes:
            if node is not last and any(user not in inside for user in node.users):
                raise NoMatch
        return Match(tuple(self.nodes), lower)


class NoMatch(Exception):
    """The graph does not match the pattern."""


def tensor(node: Any) -> torch.Tensor:
    """The fake value of an FX node. Raises `NoMatch` for a number, and for a node without a tensor value."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        raise NoMatch
    return value


def extents(node: Any) -> list[Any]:
    """The shape of a node: ints, and symbolic expressions for dynamic extents. Comparing them adds no guards."""
    return [e if isinstance(e, int) else e.node.expr for e in tensor(node).shape]


def last_axis(dim: Any, node: Any) -> bool:
    """Whether `dim`, an int or a list of one, is the last axis of `node`."""
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    return dims in ([-1], [tensor(node).ndim - 1])


class _Argument(NamedTuple):
    value: Any
    default: Any


def _bound(node: Node) -> Iterable[tuple[str, _Argument]]:
    """The arguments of a call by name, except those for placement, which do not change values."""
    for i, parameter in enumerate(aten_target(node.target)._schema.arguments):
        if parameter.name in PLACEMENT:
            continue
        default = parameter.default_value
        value = node.args[i] if i < len(node.args) else node.kwargs.get(parameter.name, default)
        yield parameter.name, _Argument(value, default)


def is_call(node: Any, *targets: str) -> bool:
    """Whether `node` is an FX node that calls one of `targets`."""
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and str(aten_target(node.target)) in targets
    )


def attempt(match: Callable[[Any, Node], Match]) -> Callable[[Any, Node], Match | None]:
    """Makes a pattern, which returns None if it does not match, of a function that raises `NoMatch`."""

    def pattern(P: Any, node: Node) -> Match | None:
        try:
            return match(P, node)
        except NoMatch:
            return None

    return pattern
