"""Attention of a Hugging Face decoder over the KV caches of a program."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from .cache import KVCache
from .latent import attend_over_latents, is_absorbed
from .masks import Mask, mask_interface
from .own import CachedStates

_INTERFACE_NAME = "mlx"
# Tensors that a module may pass to the attention, and that do not change its result.
_WITHOUT_EFFECT = ("position_ids", "cache_position")


def attend_over_cache(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: CachedStates | torch.Tensor,
    value: CachedStates | torch.Tensor,
    attention_mask: Mask | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention function that `transformers` calls.

    H, S, G and C are the numbers of heads, tokens, key heads and cached positions.

    - `query`: `[1, H, S, D]`. A model with recurrent layers runs one token of each of `B` rows as a batch:
      `[B, H, 1, D]`.
    - `key`, `value`: normally the whole cache, `[1, G, C, D]`.
    - `attention_mask`: passed on to the layer of the cache. It does not change the result. The observing cache of
      `observe.py` records it; a `KVCache` ignores it, because it already knows to which keys a query attends.
    - `s_aux`: the attention sinks.

    Returns the result, `[1, S, H, D]` or `[B, 1, H, D]`, and None in place of the attention weights. Raises ValueError
    for anything else that would change the scores.
    """
    tensors = {"attention_mask": attention_mask} | kwargs
    unknown = [name for name, x in tensors.items() if isinstance(x, torch.Tensor) and name not in _WITHOUT_EFFECT]
    if unknown:
        raise ValueError(
            f"export_llm: model: {type(module).__name__}: got {unknown[0]} for the attention, a tensor, expected a "
            "mask that depends on positions only"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError(f"export_llm: model: {type(module).__name__} is not causal, expected a decoder")
    layer = key.layer if isinstance(key, CachedStates) else module.kv_cache.layers[module.layer_idx]
    if isinstance(attention_mask, Mask):
        layer.add_mask(attention_mask.function)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    is_batch = query.shape[0] > 1
    if is_batch:
        query = query.transpose(0, 2)  # [1, H, B, D]: the cache takes the rows on the axis of tokens
    settings: dict[str, Any] = {"softcap": softcap, "sinks": s_aux}
    if is_absorbed(module):
        out = attend_over_latents(module, query, layer, scale, settings)
    else:
        # A module may change the keys or values after the update of the cache, for instance take a slice of them. The
        # result then replaces the cached keys or values in this call.
        changed = {n: x for n, x in (("keys", key), ("values", value)) if not isinstance(x, CachedStates)}
        out = layer.attend(query, scale, **settings, **changed)
    out = out.transpose(1, 2)
    out = out.transpose(0, 1) if is_batch else out
    return out.contiguous(), None  # some modules call `view` on the result


def use_cached_attention(model: torch.nn.Module, cache: KVCache) -> None:
    """Change `model` in place: every layer attends over `cache` through `mlx::cached_attention`."""
    AttentionInterface.register(_INTERFACE_NAME, attend_over_cache)
    AttentionMaskInterface.register(_INTERFACE_NAME, mask_interface)
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.kv_cache = cache
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            # Unlike `set_attn_implementation`, this also reaches models that compute their attention themselves: such
            # a model then gets a `Mask`.
            module.config._attn_implementation = _INTERFACE_NAME
