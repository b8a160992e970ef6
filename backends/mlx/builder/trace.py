"""Traces a torch function to an ATen graph that the builder can lower."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from types import NoneType
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_unflatten

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


class Traces:
    """The traces of one walk over a graph.

    The partitioner and the backend walk over the same graph, with the same `fake_mode`. The second walk gets the traces
    of the first one, which are stored in `fake_mode`. Within a walk, every trace is a graph of its own.
    """

    def __init__(self, registry: Registry, fake_mode: Any):
        self._registry, self._fake_mode = registry, fake_mode
        self._known: dict[Any, GraphModule] = vars(fake_mode).setdefault("_mlx_traces", {})
        self._counts: Counter = Counter()

    def trace(self, function: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[GraphModule, list[Slot]]:
        """Return what `trace` returns."""
        leaves, spec = tree_flatten((list(args), kwargs))
        key = self._key(function, leaves, spec)
        if key is None:
            return trace(self._registry, self._fake_mode, function, args, kwargs)
        self._counts[key] += 1
        numbered = key, self._counts[key]
        if numbered not in self._known:
            self._known[numbered], _ = trace(self._registry, self._fake_mode, function, args, kwargs)
        return self._known[numbered], [leaf for leaf in leaves if isinstance(leaf, Slot)]

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
