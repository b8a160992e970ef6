"""Attention of a Hugging Face decoder over the KV caches of a program."""

from __future__ import annotations

import torch
from transformers import AttentionInterface

from .cache import KVCache

NAME = "mlx"


def attend_over_cache(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """An attention function for the attention interface of `transformers`.

    Takes `query` `[1, H, S, D]`, and as `key` and `value` the whole cache `[1, G, C, D]`. Returns the
    result `[1, S, H, D]`, and None in place of the attention weights. A model with states runs tokens of
    several rows as a batch: `query` is then `[B, H, 1, D]`, and the result `[B, 1, H, D]`. The cache determines to which keys
    a query attends, so `attention_mask` is not used.
    """
    if s_aux is not None:
        raise ValueError(f"export_llm: model: {type(module).__name__} has attention sinks, expected none")
    if not getattr(module, "is_causal", True):
        raise ValueError(f"export_llm: model: {type(module).__name__} is not causal, expected a decoder")
    cache = module.kv_cache
    cache.attended.add(module.layer_idx)
    is_batch = query.shape[0] > 1  # of one token of each row
    if is_batch:
        query = query.transpose(0, 2)
    out = torch.ops.mlx.cached_attention(
        query,
        key,
        value,
        cache.position,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        cache.layers[module.layer_idx].window,
        softcap,
        cache.row,
        cache.rows,
    )
    out = out.transpose(1, 2)
    return out.transpose(0, 1) if is_batch else out, None


def use_cached_attention(model: torch.nn.Module, cache: KVCache) -> None:
    """Change `model` in place: every layer attends over `cache` through `mlx::cached_attention`."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.kv_cache = cache
    AttentionInterface.register(NAME, attend_over_cache)
    model.set_attn_implementation(NAME)
