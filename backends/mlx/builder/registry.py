"""The table of handlers and patterns, and `Unsupported`, the exception with which a handler refuses a node."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch.export import default_decompositions


class Unsupported(Exception):
    """Raised by a handler to refuse an FX node, for the given `reason`. The node runs on ExecuTorch's own kernels.

    Any other exception in a handler is a bug and surfaces.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def aten_target(target: Any) -> Any:
    """The ATen overload of an edge-dialect overload. Returns any other target unchanged."""
    return target._op if isinstance(target, EdgeOpOverload) else target


class Registry:
    """Handlers by target, and patterns in the order in which the builder tries them.

    A target is an ATen overload, a Python operator, or the name "library.name.overload" of an overload that may not
    be defined yet.

    The builder calls a handler as `handler(P, **arguments)`. The arguments have the names of the overload's schema,
    defaults are filled in, and slots take the place of FX nodes. The handler returns a slot, or a list of slots if
    the operator has several results. A handler that lacks a parameter for an argument raises `TypeError`, so that no
    flag is ignored silently.
    """

    def __init__(self) -> None:
        self.handlers: dict[Any, Callable] = {}
        self.patterns: list[Callable] = []
        self.decompositions: dict[torch._ops.OpOverload, Callable] = {}

    def add(self, targets: Any, handler: Callable) -> Callable:
        """Register `handler` for one target or several. Raises ValueError if a target has a handler."""
        for target in targets if isinstance(targets, (list, tuple, set)) else [targets]:
            if target in self.handlers:
                raise ValueError(f"registry: {target} is registered twice")
            self.handlers[target] = handler
        return handler

    def lower(self, *targets: Any) -> Callable[[Callable], Callable]:
        """Decorator that registers a handler for `targets`."""
        return lambda handler: self.add(targets, handler)

    def decompose(self, target: torch._ops.OpOverload, function: Callable) -> None:
        """Register a decomposition: `target` lowers as `function`, a torch function of the same arguments."""
        self.add(target, tracing_handler(target, function))
        self.decompositions[target] = function

    def pattern(self, match: Callable) -> Callable:
        """Decorator that registers a pattern: `match(P, node)` returns a `Match` that ends in `node`, or None."""
        self.patterns.append(match)
        return match

    def handler_for(self, target: Any) -> Callable | None:
        target = aten_target(target)
        return self.handlers.get(target) or self.handlers.get(str(target))

    def ops_to_preserve(self) -> list[torch._ops.OpOverload]:
        """The overloads with a handler that export would decompose by default.

        Omits views, because functionalization needs to see through them, and operators that return sizes or
        numbers, which may remain on the host. Also omits the `dim_order_ops`, which do not exist yet when export
        decomposes.
        """
        decomposed = _decomposed_by_default()
        return [
            t
            for t in self.handlers
            if isinstance(t, torch._ops.OpOverload)
            and t in decomposed
            and t.namespace != "dim_order_ops"
            and torch.Tag.view_copy not in t.tags
            and not _is_view(t)
            and _returns_tensors(t)
        ]


def tracing_handler(target: torch._ops.OpOverload, function: Callable) -> Callable:
    """The handler of an operator that lowers by tracing `function`, a torch function of the same arguments."""
    schema = target._schema
    keywords = {a.name for a in schema.arguments if a.kwarg_only}

    def lower(P: Any, **arguments: Any) -> Any:
        # By position, because the parameters of a decomposition may have other names than those of the schema.
        args = [v for name, v in arguments.items() if name not in keywords]
        kwargs = {name: v for name, v in arguments.items() if name in keywords}
        results = P.trace(function, *args, **kwargs)
        return results if len(schema.returns) > 1 else results[0]

    return lower


@functools.cache  # `default_decompositions` takes a tenth of a second
def _decomposed_by_default() -> frozenset:
    return frozenset(default_decompositions())


def _is_view(target: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None for r in target._schema.returns)


def _returns_tensors(target: torch._ops.OpOverload) -> bool:
    return all("Tensor" in str(r.type) for r in target._schema.returns)


REGISTRY = Registry()
