"""The table of handlers and patterns, and `Unsupported`, the exception with which a handler declines a node."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from torch.export import default_decompositions


class Unsupported(Exception):
    """Raised by a handler to decline an FX node, for the given `reason`. The node runs on ExecuTorch's own kernels.

    Any other exception in a handler is a bug and surfaces.
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def aten_target(target: Any) -> Any:
    """Return the ATen overload behind an edge-dialect overload. Returns any other target unchanged."""
    return target._op if isinstance(target, EdgeOpOverload) else target


def target_name(target: Any) -> str:
    """Return the name of a target for people: "aten.add.Tensor" for an overload, "torch.sym_float" for a function."""
    target = aten_target(target)
    if isinstance(target, torch._ops.OperatorBase) or not hasattr(target, "__name__"):
        return str(target)
    module = (target.__module__ or "builtins").lstrip("_")
    return f"{module}.{target.__name__}"


@dataclass(frozen=True)
class Form:
    """Portable instructions for an IR node; see `Registry.form`."""

    emit: Callable
    always: bool


class Registry:
    """Handlers by target, and patterns in the order in which the builder tries them.

    A target is an ATen overload, a Python operator, or the name "library.name.overload" of an overload that may not
    be defined yet.

    The builder calls a handler as `handler(P, **arguments)`, where `P` is the builder. The arguments have the names in
    the overload's schema, arguments that the call omits have their defaults, and slots take the place of FX nodes. The
    handler returns a slot, or a list of slots if the operator has several results. A handler without a parameter for
    one of the arguments fails with `TypeError`, so that no argument is ignored silently.
    """

    def __init__(self) -> None:
        self.handlers: dict[Any, Callable] = {}
        self.patterns: list[Callable] = []
        self.decompositions: dict[torch._ops.OpOverload, Callable] = {}
        self.reasons: dict[Any, str] = {}
        self.forms: dict[type, Form] = {}
        # Dtypes that MLX lacks, but that an operand of a target may have, because the handler reads only its bytes.
        self.hidden: dict[Any, Collection[torch.dtype]] = {}

    def add(self, targets: Any, handler: Callable) -> Callable:
        """Register `handler` for one target or several, and return it. Raises ValueError if a target has a handler."""
        for target in targets if isinstance(targets, (list, tuple, set)) else [targets]:
            if target in self.handlers:
                raise ValueError(f"registry: {target} is registered twice")
            self.handlers[target] = handler
        return handler

    def lower(self, *targets: Any) -> Callable[[Callable], Callable]:
        """Return a decorator that registers a handler for `targets`."""
        return lambda handler: self.add(targets, handler)

    def decompose(self, target: torch._ops.OpOverload, function: Callable) -> None:
        """Register a decomposition: to lower `target`, the builder traces `function`.

        `function` is a torch function with the arguments of `target`. The partitioner also decomposes `target` with it
        before ExecuTorch's verifier runs.
        """
        self.add(target, tracing_handler(target, function))
        self.decompositions[target] = function

    def decline(self, target: Any, reason: str) -> None:
        """Register the reason why `target`, an operator without a handler, is not delegated."""
        self.reasons[target] = reason

    def reason_for(self, target: Any) -> str:
        """Return the reason why `target`, an operator without a handler, is not delegated."""
        return self.reasons.get(aten_target(target), "no lowering for this operator")

    def pattern(self, match: Callable) -> Callable:
        """A decorator that registers a pattern.

        `match(P, node)` returns a `Match` whose last node is `node`, or None if the graph does not match.
        """
        self.patterns.append(match)
        return match

    def form(self, op: type, *, always: bool = False) -> Callable[[Callable], Callable]:
        """Return a decorator that registers the portable form of the IR node `op`.

        `form(P, n, env)` emits instructions and returns the slot of the result, or a list of slots. `n` has the fields
        of the node, and `env` the types of its operands. With `always`, each program gets the form of each such node,
        also if the program has extensions: some devices run the form, or MLX's own function for the node is wrong.
        """

        def register(emit: Callable) -> Callable:
            self.forms[op] = Form(emit, always)
            return emit

        return register

    def handler_for(self, target: Any) -> Callable | None:
        """Return the handler of `target`, or None if there is none."""
        target = aten_target(target)
        return self.handlers.get(target) or self.handlers.get(str(target))

    def hidden_dtypes(self, target: Any) -> Collection[torch.dtype]:
        return self.hidden.get(str(aten_target(target)), ())

    def ops_to_preserve(self) -> list[torch._ops.OpOverload]:
        """Return the overloads that have a handler and that export would decompose by default.

        Three kinds are left out: views, because functionalization needs their decomposition; operators that return
        sizes or numbers, which may remain on the host; and the `dim_order_ops`, which ExecuTorch introduces only after
        export has decomposed the graph.
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
    """Return a handler for `target` that traces `function`, a torch function with the arguments of `target`."""
    schema = target._schema
    keywords = {a.name for a in schema.arguments if a.kwarg_only}

    def lower(P: Any, **arguments: Any) -> Any:
        # Positional arguments stay positional, because `function` may name its parameters differently than the schema.
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
