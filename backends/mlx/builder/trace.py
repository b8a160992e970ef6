"""Traces a torch function to an ATen graph that the builder can lower."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import NoneType
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from ..extents import expressions
from ..workarounds.specialization import Specialized, no_specialization
from .registry import Registry, Unsupported
from .slots import Slot, TensorSlot, ValueSlot


def trace(
    registry: Registry, fake_mode: Any, function: Callable, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[GraphModule, list[Slot]]:
    """Return the ATen graph of `function(*args, **kwargs)`, and the slots that belong to its placeholders.

    In place of each tensor slot, including slots in lists, `function` gets a fake tensor of the same shape and dtype,
    and in place of a value slot, the symbol of that slot. It gets all other arguments unchanged. Operators without a
    handler are decomposed. Raises `Unsupported` if tracing would specialize or restrict a dynamic dimension, or would
    have to know a number that depends on data.
    """
    leaves, spec = tree_flatten((list(args), kwargs))
    slots = [leaf for leaf in leaves if isinstance(leaf, Slot)]

    def call(*operands: Any) -> Any:
        rest = iter(operands)
        filled = [next(rest) if isinstance(leaf, Slot) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(filled, spec)
        results = function(*args, **kwargs)
        return tuple(results) if isinstance(results, (list, tuple)) else results

    with fake_mode:
        fakes = [torch.empty(s.shape, dtype=s.dtype) if isinstance(s, TensorSlot) else s.symbol for s in slots]
    # Passes that ran earlier may leave symbols of `item()` here, which torch would expect in the results of the trace.
    if fake_mode.shape_env is not None:
        fake_mode.shape_env.pending_fresh_unbacked_symbols.clear()
    table = {t: d for t, d in _decompositions().items() if registry.handler_for(t) is None}
    table[torch.ops.aten.constant_pad_nd.default] = _pad_dynamic
    # `fake_mode` is active, so that the tensors that `function` creates are fake too and may have dynamic shapes.
    try:
        with torch.no_grad(), fake_mode, no_specialization(fake_mode):
            return make_fx(call, decomposition_table=table)(*fakes), slots
    except Specialized as error:
        raise Unsupported(f"its lowering would {error}") from None
    except GuardOnDataDependentSymNode as error:
        raise Unsupported(f"its lowering depends on {error.cond}, which is known only at run time") from None


def _pad_dynamic(x: torch.Tensor, pad: Sequence[int], value: float = 0) -> torch.Tensor:
    """Pad a tensor with dynamic dimensions, by concatenation. Return NotImplemented for any other padding.

    torch would specialize the dimensions to compute the shape of the result.
    """
    is_static = all(isinstance(size, int) for size in x.shape)
    if is_static or not all(isinstance(width, int) and width >= 0 for width in pad):
        return NotImplemented
    for index, width in enumerate(pad):
        if width:
            axis = x.dim() - 1 - index // 2
            border = x.new_full((*x.shape[:axis], width, *x.shape[axis + 1 :]), value)
            x = torch.cat((x, border) if index % 2 else (border, x), axis)
    return x


_PLAIN = (bool, int, float, str, torch.dtype, NoneType)


def _extents(fake_mode: Any) -> Iterator[torch.SymInt]:
    """Yield the symbols of extents that depend on data. All walks over a graph get the same ones, and share traces."""
    known: list[torch.SymInt] = vars(fake_mode).setdefault("_mlx_extents", [])
    for number in itertools.count():
        if number == len(known):
            known.append(fake_mode.shape_env.create_unbacked_symint())
            fake_mode.shape_env.var_to_range[known[-1].node.expr] = ValueRanges(1, int_oo)
        yield known[number]


class Traces:
    """The traces of one walk over a graph.

    The partitioner and the backend walk over the same graph, with the same `fake_mode`. The second walk gets the traces
    of the first one, which are stored in `fake_mode`. Every trace has nodes of its own: it is a copy, because functions
    are traced only once for equal arguments.
    """

    def __init__(self, registry: Registry, fake_mode: Any):
        self._registry, self._fake_mode = registry, fake_mode
        self._known: dict[Any, GraphModule] = vars(fake_mode).setdefault("_mlx_traces", {})
        self._extents = _extents(fake_mode)

    def new_extent(self) -> torch.SymInt:
        """Return the symbol of an extent of at least 1 that depends on data."""
        return next(self._extents)

    def trace(
        self, function: Callable, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[GraphModule, Graph, list[Slot]]:
        """Return the module and the slots that `trace` returns, and a copy of the module's graph."""
        leaves, spec = tree_flatten((list(args), kwargs))
        slots = [leaf for leaf in leaves if isinstance(leaf, Slot)]
        key = self._key(function, leaves, spec)
        module = self._known.get(key)
        if module is None:
            module, _ = trace(self._registry, self._fake_mode, function, args, kwargs)
        if key is not None:
            self._known[key] = module
        graph = Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        return module, graph, slots

    def _key(self, function: Callable, leaves: Sequence[Any], spec: Any) -> Any:
        """Return a key of everything that the trace depends on, or None if there is no such key.

        An inner function, such as a lambda, may differ from call to call. Symbols of `fake_mode` identify dynamic
        sizes.
        """
        if "<" in getattr(function, "__qualname__", "<"):
            return None
        values = []
        for leaf in leaves:
            if isinstance(leaf, TensorSlot):
                values.append((leaf.dtype, *expressions(leaf.shape)))
            elif isinstance(leaf, ValueSlot):
                values.append((leaf.kind, *expressions([leaf.symbol])))
            elif isinstance(leaf, _PLAIN):
                values.append((type(leaf), repr(leaf)))
            else:
                return None
        return self._registry, function, spec, tuple(values)


@functools.cache
def _decompositions() -> dict[Any, Callable]:
    """Return torch's decompositions. They are cached, because torch takes a tenth of a second to list them."""
    return dict(core_aten_decompositions().items())
