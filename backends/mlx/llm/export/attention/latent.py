"""Multi-head latent attention in its absorbed form, which attends over the compressed latents themselves.

The keys and values of a token are linear functions of its latent c: k = U c and v = W c. The key also has a part with
rotary positions, which all heads share. Therefore, q · k = (Uᵀ q) · c, and the weighted sum of the values is W times
the weighted sum of the latents. The cache keeps only c and the rotary part, as one key head. The first part of these
keys, c, also serves as the values.
"""

from __future__ import annotations

from typing import Any

import torch

from ..packed import Packed

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim")


def is_latent(module: torch.nn.Module) -> bool:
    """Whether `module` caches latents, and expands them with `expand_kv` and `kv_b_proj` to keys and values."""
    return all(hasattr(module, name) for name in (*_SIZES, "kv_b_proj", "expand_kv"))


def is_absorbed(module: torch.nn.Module) -> bool:
    """Whether `absorb` has changed `module`."""
    return hasattr(module, "absorbed_key")


def absorb(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Change each module of `model` with latent attention in place: it then attends over latents.

    The projection `kv_b_proj` is replaced by two parameters, `absorbed_key` [H, K, R], which maps a query to the
    latents, and `absorbed_value` [H, R, V], in `dtype` if the projection is quantized. R is the size of a latent, K
    that of a key without its rotary part, and V that of a value. Raises ValueError if the projection has a bias.
    """
    for module in model.modules():
        if is_latent(module) and not is_absorbed(module):
            _absorb(module, dtype)


def _absorb(module: torch.nn.Module, dtype: torch.dtype) -> None:
    projection = module.kv_b_proj
    if projection.bias is not None:
        raise ValueError(f"export_llm: model: {type(module).__name__}: got kv_b_proj with a bias, expected none")
    if isinstance(projection, Packed):
        weight = projection.dequantized() * (projection.factor or 1)
        weight = weight.to(dtype)
    else:
        weight = projection.weight
    rank, key_size, value_size = (getattr(module, name) for name in _SIZES)
    key, value = weight.detach().reshape(-1, key_size + value_size, rank).split([key_size, value_size], 1)
    module.absorbed_key = torch.nn.Parameter(key.contiguous(), requires_grad=False)
    module.absorbed_value = torch.nn.Parameter(value.mT.contiguous(), requires_grad=False)
    del module.kv_b_proj
    module.kv_b_proj = None
    module.expand_kv = lambda latents, rotary: (latents, rotary)


def attend_over_latents(module, query: torch.Tensor, layer, scale: float, settings: dict[str, Any]) -> torch.Tensor:
    """Return the attention [1, H, S, V] of `query` [1, H, S, K + R'] over the latents of `layer`.

    The first K numbers of a query belong to the expanded key, the others to its rotary part.
    """
    key_size = module.absorbed_key.shape[1]
    latent_query = torch.matmul(query[..., :key_size], module.absorbed_key)
    query = torch.cat([latent_query, query[..., key_size:]], -1)
    latents = layer.attend(query, scale, **settings, value_size=module.kv_lora_rank)
    return torch.matmul(latents, module.absorbed_value)
