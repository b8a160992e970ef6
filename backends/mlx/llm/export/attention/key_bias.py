"""Attention with a bias of the scores that depends on the key only, as in Doge.

The bias is one more number of a cached key. The query has a 1 in this place.
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

import torch


def use_key_bias(model: torch.nn.Module) -> None:
    """Change each module of `model` with such a bias, in place."""
    for module in model.modules():
        if type(module).__name__ == "DogeAttention":
            module.forward = MethodType(_forward, module)


def _forward(self, hidden_states, position_embeddings, attention_mask, cache: Any, **kwargs):
    """The forward method of `DogeAttention`, in contexts in which it attends to all keys."""
    shape, transformers = hidden_states.shape[:-1], sys.modules[type(self).__module__]
    projections = self.q_proj, self.k_proj, self.v_proj
    query, key, value = (p(hidden_states).unflatten(-1, (-1, self.head_dim)) for p in projections)
    bias = torch.exp(self.A * torch.nn.functional.softplus(self.dt_proj(value.flatten(2)))) / self.scaling
    query, key, value = (x.transpose(1, 2) for x in (self.q_norm(query), self.k_norm(key), value))
    query, key = transformers.apply_rotary_pos_emb(query, key, *position_embeddings)
    query = torch.cat([query, query.new_ones((*query.shape[:3], 1))], -1)
    key = torch.cat([key, bias.transpose(1, 2).unsqueeze(-1).to(key.dtype)], -1)
    key, value = cache.update(key, value, self.layer_idx)
    attend = transformers.ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling)
    return self.o_proj(out.reshape(*shape, -1)), None
