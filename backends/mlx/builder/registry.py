"""What lowers to what: `target → handler`, and the patterns that see several nodes at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch.export import default_decompositions


class Unsupported(Exception):
    """This node does not lower; `reason` says why. It runs on ExecuTorch's own kernels.

    The one exception by which a handler may turn a node down. Every other one is a bug
    and surfaces.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def aten_target(target: Any) -> Any:
    """The ATen overload behind an edge-dialect one; anything else as it is."""
    return target._op if isinstance(target, EdgeOpOverload) else target


class Registry:
    """Handlers by ATen overload (or Python operator), patterns in the order they are tried. An
    overload that may come to be defined later goes by its name, "library.name.overload".

    A handler is called as `handler(P, **arguments)` with the arguments of the overload's
    schema by name, defaults filled in and nodes replaced by their slots; it returns a slot,
    or a list of them for an operator with several results. An argument that a handler does
    not name is a `TypeError`, so that no flag is dropped in silence.
    """

    def __init__(self) -> None:
        self.handlers: dict[Any, Callable] = {}
        self.patterns: list[Callable] = []
        self.texts: dict[torch._ops.OpOverload, Callable] = {}

    def add(self, targets: Any, handler: Callable) -> Callable:
        for target in targets if isinstance(targets, (list, tuple, set)) else [targets]:
            if target in self.handlers:
                raise ValueError(f"registry: {target} is registered twice")
            self.handlers[target] = handler
        return handler

    def lower(self, *targets: Any) -> Callable[[Callable], Callable]:
        return lambda handler: self.add(targets, handler)

    def spell(self, target: torch._ops.OpOverload, text: Callable) -> None:
        """`target` has no node: it lowers as `text`, a torch function of its arguments."""
        self.add(target, traced(target, text))
        self.texts[target] = text

    def pattern(self, match: Callable) -> Callable:
        """`match(P, node)` returns a `patterns.Match` whose last node is `node`, or None."""
        self.patterns.append(match)
        return match

    def find(self, target: Any) -> Callable | None:
        target = aten_target(target)
        return self.handlers.get(target) or self.handlers.get(str(target))

    def decomposable(self) -> list[torch._ops.OpOverload]:
        """Overloads with a handler that export would otherwise take apart. Views are left to
        export: it has to see through them. So are sizes and numbers, which may stay with the host.
        Operators of the edge dialect's own are not its business: they come later, in place of
        others."""
        table = _decomposed()
        return [
            t
            for t in self.handlers
            if isinstance(t, torch._ops.OpOverload)
            and t in table
            and t.namespace != "dim_order_ops"
            and torch.Tag.view_copy not in t.tags
            and not _is_view(t)
            and _returns_tensors(t)
        ]


def traced(target: torch._ops.OpOverload, text: Callable) -> Callable:
    """The handler of an operator that lowers by tracing `text`, a torch function of its arguments."""
    schema = target._schema
    keywords = {a.name for a in schema.arguments if a.kwarg_only}

    def lower(P: Any, **arguments: Any) -> Any:
        # By position: decompositions have names of their own for their parameters.
        args = [v for name, v in arguments.items() if name not in keywords]
        kwargs = {name: v for name, v in arguments.items() if name in keywords}
        results = P.trace(text, *args, **kwargs)
        return results if len(schema.returns) > 1 else results[0]

    return lower


@functools.cache
def _decomposed() -> frozenset:
    """What export takes apart by default. Asking torch costs a tenth of a second."""
    return frozenset(default_decompositions())


def _is_view(target: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None for r in target._schema.returns)


def _returns_tensors(target: torch._ops.OpOverload) -> bool:
    return all("Tensor" in str(r.type) for r in target._schema.returns)


REGISTRY = Registry()
