"""Building blocks of patterns: a `Matcher` walks the graph backwards from a node, and a `Match` is the result."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from ..extents import expressions
from .bind import PLACEMENT
from .registry import aten_target
from .slots import TensorSlot

# Targets with the same meaning, for patterns that accept any of them.
CASTS = ("aten._to_copy.default", "dim_order_ops._to_dim_order_copy.default")
VIEWS = ("aten.view_copy.default", "aten.view.default", "aten._unsafe_view.default")
UNSQUEEZES = ("aten.unsqueeze_copy.default", "aten.unsqueeze.default")


@dataclass(frozen=True)
class Match:
    """The result of a pattern.

    `nodes` are the FX nodes that the pattern lowers together. `lower(P, last)` is the handler of the fusion: `P` is the
    builder (`ProgramBuilder`), `last` is the last of these nodes, and the handler returns the value of that node.
    `hidden` are dtypes that MLX lacks but values between the nodes may have, because the handler does not compute them.
    `reads` are nodes whose values the handler reads although no node of the match has them as operands. If such a value
    is a buffer, nothing overwrites it before the handler runs.
    """

    nodes: tuple[Node, ...]
    lower: Callable[[Any, Node], Any]
    hidden: tuple[torch.dtype, ...] = ()
    reads: tuple[Node, ...] = ()


class Matcher:
    """Collects the FX nodes that a pattern visits. Its methods raise `NoMatch` if the graph does not match.

    A pattern must prove every assumption of its fusion. The method `arguments` helps: it raises `NoMatch` if an
    argument that the pattern does not name differs from its default. Arguments in `PLACEMENT`, such as a device, are
    ignored.
    """

    def __init__(self, P: Any):
        self.P = P
        self.nodes: list[Node] = []

    def call(self, node: Any, *targets: str) -> Node:
        """Add `node` to the match and return it. Raises `NoMatch` unless `node` calls one of `targets`.

        A target is given by name, such as "aten.mul.Tensor".
        """
        if not is_call(node, *targets):
            raise NoMatch
        if node not in self.nodes:
            self.nodes.append(node)
        return node

    def arguments(self, node: Any, targets: Iterable[str], *names: str) -> tuple[Any, ...]:
        """Add `node` to the match and return the values of its arguments `names`, in that order.

        The names are those in the schema of the target. An argument that the call omits has its default. Raises
        `NoMatch` if `node` calls none of `targets`, or if an argument outside `names`, such as `alpha` of an addition,
        differs from its default.
        """
        node = self.call(node, *targets)
        bound = dict(_bound(node))
        values = tuple(bound.pop(name).value for name in names)
        if any(argument.value != argument.default for argument in bound.values()):
            raise NoMatch
        return values

    def result(self, node: Any, index: int) -> Node:
        """Add `node`, which takes the result `index` of a call with several, to the match. Returns the call."""
        if not isinstance(node, Node) or node.target is not operator.getitem or node.args[1] != index:
            raise NoMatch
        self.nodes.append(node)
        return node.args[0]

    def commuted(self, node: Any, *targets: str) -> Iterator[tuple[Any, Any]]:
        """Add `node`, a commutative call, to the match and yield its two operands in both orders.

        If the caller asks for the second order, the nodes that it has added for the first one leave the match.
        """
        a, b = self.arguments(node, targets, "self", "other")
        before = list(self.nodes)
        yield a, b
        self.nodes[:] = before
        yield b, a

    def before_casts(self, node: Any, can_skip: Callable[[torch.dtype, torch.dtype], bool]) -> Any:
        """Skip the casts that end in `node`: add them to the match and return the operand of the first cast.

        Returns `node` itself if it is not a cast. `can_skip(source, target)` says whether the pattern may skip a
        cast from dtype `source` to dtype `target`. Raises `NoMatch` for a cast that it may not skip.
        """
        while is_call(node, *CASTS):
            source, _ = self.arguments(node, CASTS, "self", "dtype")
            if not can_skip(tensor(source).dtype, tensor(node).dtype):
                raise NoMatch
            node = source
        return node

    def number(self, value: Any) -> float:
        """Return the number that an argument holds: a Python number, or the 0-d constant that export made of one.

        Casts of the constant are applied, except a last cast to a float dtype: ExecuTorch inserts such casts, but torch
        computes with the number itself. Raises `NoMatch` for any other argument.
        """
        casts = []
        while is_call(value, *CASTS):
            casts.insert(0, tensor(value).dtype)
            value, _ = Matcher(self.P).arguments(value, CASTS, "self", "dtype")  # constants do not join the match
        if isinstance(value, (int, float)):
            return value
        slot = self.P.value_or_none(value)
        if not isinstance(slot, TensorSlot) or slot.constant_value is None:
            raise NoMatch
        if casts and casts[-1].is_floating_point:
            casts.pop()
        if not casts:
            return slot.constant_value
        number = torch.tensor(slot.constant_value, dtype=slot.dtype)
        for dtype in casts:
            number = number.to(dtype)
        return number.item()

    def finish(
        self,
        last: Node,
        lower: Callable[[Any, Node], Any],
        hidden: tuple[torch.dtype, ...] = (),
        reads: tuple[Node, ...] = (),
    ) -> Match:
        """Return the match, with the handler `lower`, the dtypes `hidden` and the nodes `reads`.

        Raises `NoMatch` if a node of the match other than `last` has a user outside the match.
        """
        inside = set(self.nodes)
        for node in self.nodes:
            if node is not last and any(user not in inside for user in node.users):
                raise NoMatch
        return Match(tuple(self.nodes), lower, hidden, reads)


class NoMatch(Exception):
    """Raised if the graph does not match the pattern."""


def tensor(node: Any) -> torch.Tensor:
    """Return the fake value of an FX node. Raises `NoMatch` for a number, and for a node without a tensor value."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        raise NoMatch
    return value


def extents(node: Any) -> list[Any]:
    """Return the shape of a node: ints, and symbolic expressions for dynamic extents."""
    return expressions(tensor(node).shape)


def is_last_axis(dim: Any, node: Any) -> bool:
    """Whether `dim`, an int or a list of one, is the last axis of `node`."""
    dims = list(dim) if isinstance(dim, (list, tuple)) else [dim]
    return dims in ([-1], [tensor(node).ndim - 1])


class _Argument(NamedTuple):
    value: Any
    default: Any


def _bound(node: Node) -> Iterable[tuple[str, _Argument]]:
    """Yield the arguments of a call by name, except those in `PLACEMENT`, which do not change values."""
    for i, parameter in enumerate(aten_target(node.target)._schema.arguments):
        if parameter.name in PLACEMENT:
            continue
        default = parameter.default_value
        value = node.args[i] if i < len(node.args) else node.kwargs.get(parameter.name, default)
        yield parameter.name, _Argument(value, default)


def is_call(node: Any, *targets: str) -> bool:
    """Whether `node` is an FX node that calls one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and str(aten_target(node.target)) in targets


def attempt(match: Callable[[Any, Node], Match]) -> Callable[[Any, Node], Match | None]:
    """A decorator that makes a pattern of `match`: the pattern returns None if `match` raises `NoMatch`."""

    def pattern(P: Any, node: Node) -> Match | None:
        try:
            return match(P, node)
        except NoMatch:
            return None

    return pattern
