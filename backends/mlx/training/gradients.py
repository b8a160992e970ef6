"""Gradients as torch functions that `torch.export` can export.

Eager torch computes them with its autograd. During an export, `value_and_grad` first traces the forward and the
backward pass to one graph of ATen operators, and then calls this graph, so that the exported program has all operators
of both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..custom_ops.training import silu_gradient
from .fused import fused_gradients
from .recompute import keep_recomputed
from .slices import join_slices


def jvp(function: Callable, primals: tuple[torch.Tensor, ...], tangents: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
    """Return `function(*primals)`, and the product of the Jacobian of `function` with `tangents`.

    The arguments are those of `torch.func.jvp`. `function` may use no other tensors than its arguments.
    """
    if not torch.compiler.is_exporting():
        return torch.func.jvp(function, primals, tangents)
    spec = None

    def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # The product with the transposed Jacobian is linear in the cotangents. Its gradient with respect to them is the
        # product with the Jacobian. torch cannot trace its own forward mode.
        nonlocal spec
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in tensors[: len(primals)]]
            results, spec = tree_flatten(function(*leaves))
            cotangents = [torch.zeros_like(y).requires_grad_() for y in results]
            pulled = torch.autograd.grad(results, leaves, cotangents, create_graph=True, materialize_grads=True)
            pushed = torch.autograd.grad(pulled, cotangents, tensors[len(primals) :], materialize_grads=True)
        return *(y.detach() for y in results), *pushed

    flat = traced(compute)(*primals, *tangents)
    count = len(flat) // 2
    return tree_unflatten(flat[:count], spec), tree_unflatten(flat[count:], spec)


def value_and_grad(
    module: torch.nn.Module, loss: Callable[..., torch.Tensor], names: Collection[str] | None = None
) -> Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Return a function that computes `loss(module, *args)` and its gradients.

    The function takes `*args`, and optionally `parameters`, tensors by name that take the place of those of `module`.
    It returns the loss, a tensor with one element, and the gradients by name. `names` are the parameters or buffers
    with gradients; by default the parameters that require one. Other tensors that `loss` uses have to be in `module`
    or in `args`.

    Raises ValueError if `module` lacks one of the names, or if there is none.
    """
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if names is None:
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    unknown = sorted(set(names) - tensors.keys())
    if unknown or not names:
        raise ValueError(f"value_and_grad: names: got {', '.join(unknown) or 'none'}, expected tensors of the module")
    names = tuple(names)

    def function(*args: Any, parameters: Mapping[str, torch.Tensor] | None = None):
        current = dict(module.named_parameters()) | dict(module.named_buffers()) | dict(parameters or {})
        leaves, spec = tree_flatten((args, current))

        def compute(*leaves: Any) -> tuple[torch.Tensor, ...]:
            args, current = tree_unflatten(list(leaves), spec)
            return _gradients(module, loss, args, current, names)

        def fused(*leaves: Any) -> tuple[torch.Tensor, ...]:
            with fused_gradients():
                return compute(*leaves)

        value, *gradients = traced(fused)(*leaves) if torch.compiler.is_exporting() else compute(*leaves)
        return value, dict(zip(names, gradients))

    return function


def vjp(function: Callable, *primals: torch.Tensor) -> tuple[Any, Callable[[Any], tuple[torch.Tensor, ...]]]:
    """Return `function(*primals)`, and a function that multiplies its argument by the Jacobian of `function`.

    The second function takes cotangents of the structure of the result, and returns a gradient for each of `primals`,
    as that of `torch.func.vjp` does. `function` may use no other tensors than its arguments.
    """
    if not torch.compiler.is_exporting():
        return torch.func.vjp(function, *primals)

    def pull(cotangents: Any) -> tuple[torch.Tensor, ...]:
        flat, spec = tree_flatten(cotangents)

        def compute(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.enable_grad():
                leaves = [t.detach().requires_grad_() for t in tensors[: len(primals)]]
                results, result_spec = tree_flatten(function(*leaves))
                if result_spec != spec:
                    raise ValueError(f"vjp: got cotangents {spec}, expected the structure of the result, {result_spec}")
                given = tensors[len(primals) :]
                gradients = torch.autograd.grad(results, leaves, given, materialize_grads=True)
            return results[0].detach(), *gradients

        return tuple(traced(compute)(*primals, *flat)[1:])

    return function(*primals), pull


class _Call(torch.nn.Module):
    """Makes `function(module, *args)` a module, so that `functional_call` can replace its tensors."""

    def __init__(self, module: torch.nn.Module, function: Callable):
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Any) -> Any:
        return self.function(self.module, *args)


def call_with(module: torch.nn.Module, function: Callable, tensors: Mapping[str, torch.Tensor], *args: Any) -> Any:
    """Return `function(module, *args)` while `tensors` take the place of those of `module` with the same names."""
    return functional_call(_Call(module, function), {f"module.{name}": t for name, t in tensors.items()}, args)


def _gradients(
    module: torch.nn.Module,
    loss: Callable,
    args: Sequence[Any],
    current: Mapping[str, torch.Tensor],
    names: Sequence[str],
) -> tuple[torch.Tensor, ...]:
    """Return the loss and its gradients with respect to the tensors `names` of `current`."""
    leaves = {name: current[name].detach().requires_grad_() for name in names}

    def compute(module: torch.nn.Module, *args: Any) -> tuple[torch.Tensor, ...]:
        value = loss(module, *args)
        gradients = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
        return value.detach(), *gradients

    # The gradients are computed while the module has its new tensors, because checkpointing runs parts of it again.
    with torch.enable_grad():
        return call_with(module, compute, {n: t.detach() for n, t in current.items()} | leaves, *args)


def traced(function: Callable) -> Callable:
    """Return a function of tensors and numbers that calls `function` as one graph of ATen operators.

    The graph is traced with new fake tensors of the types of the arguments, outside of the modes of an export.
    """

    def call(*leaves: Any) -> Any:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        mode = detect_fake_mode(tensors)
        types = [(t.shape, t.stride(), t.dtype, t.device) for t in tensors]

        def of_tensors(*tensors: torch.Tensor) -> Any:
            rest = iter(tensors)
            return function(*(next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves))

        with _disable_current_modes(), mode:
            fakes = [torch.empty_strided(s, strides, dtype=d, device=dev) for s, strides, d, dev in types]
            # Attention by products has a gradient of plain operators.
            with sdpa_kernel(SDPBackend.MATH), _without_onednn():
                graph = make_fx(of_tensors, decomposition_table=_decompositions())(*fakes)
        keep_recomputed(graph)
        join_slices(graph)
        return graph(*tensors)

    return call


@functools.cache
def _decompositions() -> dict[Any, Callable]:
    """Return torch's decompositions of the operators that compute gradients, such as `silu_backward`."""
    table = {target: f for target, f in decomposition_table.items() if "backward" in str(target)}
    return table | {torch.ops.aten.silu_backward.default: silu_gradient}


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Keep oneDNN's operators, which have no decomposition, out of a trace."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)
