"""Small vocabulary for patterns that look backwards from a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from .registry import aten_target
from .slots import TensorSlot

# The spellings of one thing that several patterns look through.
CASTS = ("aten._to_copy.default", "dim_order_ops._to_dim_order_copy.default")
UNSQUEEZES = ("aten.unsqueeze_copy.default", "aten.unsqueeze.default")


@dataclass(frozen=True)
class Match:
    """`nodes`: everything the fusion swallows; `lower(P, last)`: its handler."""

    nodes: tuple[Node, ...]
    lower: Callable[[Any, Node], Any]


class Matcher:
    """Collects the nodes a pattern walks over; any step that does not fit raises `NoMatch`."""

    def __init__(self, P: Any):
        self.P = P
        self.nodes: list[Node] = []

    def call(self, node: Any, *targets: str) -> Node:
        """`node`, if it calls one of `targets` (as in "aten.mul.Tensor")."""
        if not is_call(node, *targets):
            raise NoMatch
        if node not in self.nodes:
            self.nodes.append(node)
        return node

    def commuted(self, node: Any, *targets: str) -> Iterable[tuple[Any, Any]]:
        """Both orders of the two operands of a commutative call."""
        a, b = self.call(node, *targets).args[:2]
        return (a, b), (b, a)

    def uncast(self, node: Any) -> Any:
        """What was cast to the value of `node`; the casts join the match."""
        while is_call(node, *CASTS):
            node = self.call(node, *CASTS).args[0]
        return node

    def number(self, value: Any) -> float:
        """A Python number, or one that export has made a tensor."""
        while is_call(value, *CASTS):
            value = value.args[0]
        if isinstance(value, (int, float)):
            return value
        slot = self.P.value_or_none(value)
        if isinstance(slot, TensorSlot) and slot.number is not None:
            return slot.number
        raise NoMatch

    def finish(self, last: Node, lower: Callable[[Any, Node], Any]) -> Match:
        """The match, if nobody outside reads an inner node."""
        inside = set(self.nodes)
        for node in self.nodes:
            if node is not last and any(user not in inside for user in node.users):
                raise NoMatch
        return Match(tuple(self.nodes), lower)


class NoMatch(Exception):
    """A pattern does not fit here."""


def is_call(node: Any, *targets: str) -> bool:
    return (
        isinstance(node, Node)
        and node.op == "call_function"
        and str(aten_target(node.target)) in targets
    )


def attempt(match: Callable[[Any, Node], Match]) -> Callable[[Any, Node], Match | None]:
    """A pattern that says None instead of raising `NoMatch`."""

    def tried(P: Any, node: Node) -> Match | None:
        try:
            return match(P, node)
        except NoMatch:
            return None

    return tried
