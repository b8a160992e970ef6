"""Replacements for the functions in `transformers` that have optional CUDA kernels: convolutions and recurrences.

Each family of models has its own copy of these functions, under the same few names. `kernels_of` replaces them by
functions that can be exported for any number of tokens, and that continue from the state of a cache.

The modules call them for single tokens too: see `StateCache.get_recurrent_state`. The initial state of a recurrence is
the one that the layer has just read from the cache, `cache.current`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ....custom_kernel_ops import layer_state, recurrence  # noqa: F401  (define the operators)
from ....workarounds.module_names import replaced_names


def kernels_of(model: PreTrainedModel, cache: Any) -> AbstractContextManager[None]:
    """Return a context within which the modules of `model` call the functions below, with the states of `cache`."""
    return replaced_names(model, functools.partial(_replacement, cache))


def _replacement(cache: Any, module: Any, value: Any) -> Any:
    if inspect.isfunction(value) and value.__module__.startswith("transformers.models."):
        kernel = KERNELS.get(value.__name__)
        return None if kernel is None else _bound(kernel, cache)
    # The modules of a family may accept only the family's own class of caches. They then see `Cache` in its place.
    if inspect.isclass(value) and issubclass(value, Cache) and value.__module__ == module.__name__:
        return Cache
    return None


def _bound(kernel: Callable, cache: Any) -> Callable:
    return lambda *args, **kwargs: kernel(cache, *args, **kwargs)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument of `model.forward` that takes the cache: `cache` since transformers 5.24."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "cache_params") if name in parameters), "past_key_values")


def begin_recurrence(cache: Any, state: torch.Tensor | None, shape: tuple) -> torch.Tensor:
    """Return `state` as float32, or zeros of `shape` if it is None.

    Records in `cache.recurred` that the current layer runs a recurrence of this package.
    """
    cache.recurred.add(cache.current[0])
    return torch.zeros(shape) if state is None else state.float()


def recur(cache: Any, operator: Any, tensors: tuple[torch.Tensor, ...], state: torch.Tensor):
    """Run a recurrence whose state has the layout of the cache, and return its outputs and its new state.

    The recurrence is recorded, so that a row can be rewound.
    """
    cache.record(operator, tensors, state)
    return operator(*tensors, state)


# Convolutions -----------------------------------------------------------------------------


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None):
    """Return the causal convolution of each channel of `x` `[B, D, S]` with `weight` `[D, K]`."""
    out = torch.ops.mlx.causal_conv1d(x, weight, bias)
    return (out if activation is None else ACT2FN[activation](out)).to(x.dtype)


def causal_conv1d_fn(cache, hidden_states, weight, bias=None, activation=None, **kwargs):
    return causal_conv(hidden_states, weight, bias, activation)


# The gated delta rule ---------------------------------------------------------------------


def gated_delta_rule(cache, query, key, value, g, beta, use_qk_l2norm_in_kernel=False, **kwargs):
    """Take `query`, `key` and `value` `[B, S, H, D]`. Returns the outputs and the new state."""
    dtype = query.dtype
    query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    shape = (*value.shape[:2], key.shape[-1], value.shape[-1])
    state = begin_recurrence(cache, cache.current[1], shape)
    out, state = recur(cache, recurrence.gated_delta_rule, (query, key, value, g, beta), state)
    return out.transpose(1, 2).to(dtype), state


# State spaces -----------------------------------------------------------------------------


def mamba2_chunk_scan(
    cache,
    hidden_states,
    dt,
    A,
    B,
    C,
    chunk_size=None,
    D=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    z=None,
    **kwargs,
):
    """Take `hidden_states` `[B, S, H, P]`, `dt` `[B, S, H]`, `A` `[H]`, `B` and `C` `[B, S, G, N]`."""
    dt = _time_step(dt, dt_bias, dt_softplus)
    if tuple(dt_limit) != (0.0, float("inf")) or not dt_softplus:
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    x = hidden_states.float()
    value = (x * dt[..., None].float()).transpose(1, 2)
    log_decay = (A.float() * dt.float()).transpose(1, 2)
    key, query = (t.transpose(1, 2).float() for t in (B, C))
    state = begin_recurrence(cache, cache.current[1], (*value.shape[:2], value.shape[-1], key.shape[-1]))
    out, state = torch.ops.mlx.gated_linear_attention(query, key, value, log_decay, state.mT)
    out = _with_skip_and_gate(out.transpose(1, 2).contiguous(), x, None if D is None else D[..., None], z)
    return (out, state.mT) if return_final_states else out


def mamba_selective_scan(
    cache,
    hidden_states,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    return_last_state=False,
    **kwargs,
):
    """Take `hidden_states` and `dt` `[B, D, S]`, `A` `[D, N]`, `B` and `C` `[B, N, S]`.

    If the initial state has an axis for heads, the layer calls this function for one head after the other.
    """
    layer, state = cache.current
    if state is not None and state.dim() == 4:
        head = cache.head if layer in cache.recurred else 0
        cache.head = head + 1
        state = state[:, head]
    dt = _time_step(dt, None if delta_bias is None else delta_bias[..., None], delta_softplus)
    x = hidden_states.float()
    state = begin_recurrence(cache, state, (*x.shape[:2], A.shape[-1]))
    tokens = (t.float().transpose(1, 2) for t in (x, dt, B, C))
    out, state = torch.ops.mlx.selective_scan(*tokens, A.float(), state)
    out = _with_skip_and_gate(out.transpose(1, 2), x, None if D is None else D[:, None], z)
    return (out, state) if return_last_state else out


def _time_step(dt, bias, softplus):
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return torch.nn.functional.softplus(dt) if softplus else dt


def _with_skip_and_gate(out, x, skip, z):
    out = out if skip is None else out + x * skip
    return out if z is None else out * torch.nn.functional.silu(z)


# The name of a function in `transformers` → its replacement.
KERNELS: dict[Any, Callable] = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba_selective_scan": mamba_selective_scan,
}
