"""Replacements for the functions in `transformers` that have optional CUDA kernels: convolutions and recurrences.

Each family of models has its own copy of these functions, under the same few names. `kernels_of` replaces them by
functions that can be exported for any number of tokens, and that continue from the state of a cache.

Decoding of several rows calls the functions for one token, `..._update`. They use the same operators as the functions
for many tokens, with which a row is decoded alone, so that both give the same bits.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from ....custom_kernel_ops import layer_state, recurrence  # noqa: F401  (define the operators)


@contextmanager
def kernels_of(model: PreTrainedModel, cache: Any) -> Iterator[None]:
    """Within the context, the modules of `model` call the functions below, with the states of `cache`."""
    replaced = []
    try:
        for module in {sys.modules[type(m).__module__] for m in model.modules()}:
            for name, value in list(vars(module).items()):
                new = _replacement(module, name, value, cache)
                if new is not None:
                    replaced.append((module, name, value))
                    setattr(module, name, new)
        yield
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def _replacement(module: Any, name: str, value: Any, cache: Any) -> Any:
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


def causal_conv1d_update(cache, hidden_states, conv_state, weight, bias=None, activation=None):
    """Updates `conv_state` `[B, D, K]` in place."""
    joined = torch.cat([conv_state, hidden_states], -1)
    conv_state.copy_(joined[..., -conv_state.shape[-1] :])
    return causal_conv(joined, weight, bias, activation)[..., -hidden_states.shape[-1] :]


# The gated delta rule ---------------------------------------------------------------------


def gated_delta_rule(
    cache, query, key, value, g, beta, initial_state=None, use_qk_l2norm_in_kernel=False, **kwargs
):
    """Takes `query`, `key` and `value` `[B, S, H, D]`. Returns the outputs and the new state."""
    dtype = query.dtype
    query, key, value, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    shape = (*value.shape[:2], key.shape[-1], value.shape[-1])
    state = begin_recurrence(cache, initial_state, shape)
    out, state = recur(cache, recurrence.gated_delta_rule, (query, key, value, g, beta), state)
    return out.transpose(1, 2).to(dtype), state


# State spaces -----------------------------------------------------------------------------


def mamba2_chunk_scan(
    cache, hidden_states, dt, A, B, C, chunk_size=None, D=None, dt_bias=None, initial_states=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), return_final_states=False, z=None, **kwargs,
):  # fmt: skip
    """Takes `hidden_states` `[B, S, H, P]`, `dt` `[B, S, H]`, `A` `[H]`, `B` and `C` `[B, S, G, N]`."""
    dt = _time_step(dt, dt_bias, dt_softplus)
    if tuple(dt_limit) != (0.0, float("inf")) or not dt_softplus:
        dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1])
    x = hidden_states.float()
    value = (x * dt[..., None].float()).transpose(1, 2)
    log_decay = (A.float() * dt.float()).transpose(1, 2)
    key, query = (t.transpose(1, 2).float() for t in (B, C))
    state = begin_recurrence(cache, initial_states, (*value.shape[:2], value.shape[-1], key.shape[-1]))
    out, state = torch.ops.mlx.gated_linear_attention(query, key, value, log_decay, state.mT)
    out = _with_skip_and_gate(out.transpose(1, 2).contiguous(), x, None if D is None else D[..., None], z)
    return (out, state.mT) if return_final_states else out


def mamba2_selective_state_update(
    cache, state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs
):
    """Updates `state` `[B, H, P, N]` in place, for one token, with the operators of `mamba2_chunk_scan`.

    Takes `dt` `[B, H, P]`, `A` `[H, P, N]`, and `D` and `dt_bias` `[H, P]`. They have the same value for all of P and N.
    """
    D, dt_bias = (None if x is None else x[:, 0] for x in (D, dt_bias))
    out, new = mamba2_chunk_scan(
        cache, hidden_states[:, None], dt[:, None, :, 0], A[:, 0, 0], B[:, None], C[:, None], D=D, dt_bias=dt_bias,
        initial_states=state, dt_softplus=dt_softplus, return_final_states=True, z=None if z is None else z[:, None],
    )  # fmt: skip
    state.copy_(new.to(state.dtype))
    return out[:, 0].to(hidden_states.dtype)


def mamba_selective_scan(
    cache, hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False,
    **kwargs,
):  # fmt: skip
    """Takes `hidden_states` and `dt` `[B, D, S]`, `A` `[D, N]`, `B` and `C` `[B, N, S]`.

    The function of `transformers` takes no initial state. The initial state is the one that the layer has just read
    from the cache. If this state has an axis for heads, the layer calls this function for one head after the other.
    """
    layer, state = cache.current
    if state is not None and state.dim() == 4:
        head = cache.head if layer in cache.recurred else 0
        cache.head = head + 1
        state = state[:, head]
    out, state = _selective_scan(cache, hidden_states, dt, A, B, C, D, z, delta_bias, delta_softplus, state)
    return (out, state) if return_last_state else out


def mamba_selective_state_update(
    cache, state, hidden_states, dt, A, B, C, D=None, dt_bias=None, dt_softplus=False, z=None, **kwargs
):
    """Updates `state` `[B, D, N]` in place, for one token, with the operators of `mamba_selective_scan`.

    Takes `hidden_states`, `dt` and `z` `[B, D]`, and `B` and `C` `[B, N]`.
    """
    x, dt, B, C, z = (None if t is None else t[..., None] for t in (hidden_states, dt, B, C, z))
    out, new = _selective_scan(cache, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state)
    state.copy_(new.to(state.dtype))
    return out[..., 0].to(hidden_states.dtype)


def _selective_scan(cache, x, dt, A, B, C, D, z, dt_bias, dt_softplus, state):
    dt = _time_step(dt, None if dt_bias is None else dt_bias[..., None], dt_softplus)
    x = x.float()
    state = begin_recurrence(cache, state, (*x.shape[:2], A.shape[-1]))
    tokens = (t.float().transpose(1, 2) for t in (x, dt, B, C))
    out, state = torch.ops.mlx.selective_scan(*tokens, A.float(), state)
    return _with_skip_and_gate(out.transpose(1, 2), x, None if D is None else D[:, None], z), state


def _time_step(dt, bias, softplus):
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return torch.nn.functional.softplus(dt) if softplus else dt


def _with_skip_and_gate(out, x, skip, z):
    out = out if skip is None else out + x * skip
    return out if z is None else out * torch.nn.functional.silu(z)


# The name of a function in `transformers` → its replacement.
KERNELS = {
    "causal_conv1d_fn": causal_conv1d_fn,
    "causal_conv1d_update": causal_conv1d_update,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "torch_recurrent_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "recurrent_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_chunk_scan,
    "mamba2_selective_state_update": mamba2_selective_state_update,
    "mamba_selective_scan": mamba_selective_scan,
    "mamba_selective_state_update": mamba_selective_state_update,
}
