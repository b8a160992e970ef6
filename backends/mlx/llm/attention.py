"""How a Hugging Face decoder attends when its cache lives in the program."""

from __future__ import annotations

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from .cache import StaticKVCache

NAME = "mlx"


def cached_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """The attention interface of `transformers`: query `[B, H, S, D]`, key and value the whole
    cache `[B, G, C, D]`; returns `[B, S, H, D]`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    start = module.kv_cache.position
    out = torch.ops.mlx.cached_attention(query, key, value, start, scale)
    return out.transpose(1, 2), None


def use_cached_attention(model: torch.nn.Module, cache: StaticKVCache) -> None:
    """Make `model` attend over `cache` through `mlx::cached_attention`, which needs no mask."""
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.kv_cache = cache
    AttentionInterface.register(NAME, cached_attention)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    model.set_attn_implementation(NAME)
