"""How tensors of transformers are made from the tensors of a GGUF file, where this is more than another name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Config = Any  # the config of the model


@dataclass(frozen=True)
class Recipe:
    """How to make a tensor of transformers from `parts`, for files that have all of these tensors.

    - `name`: the name in transformers. In a layer, it is the part after `layers.N.`.
    - `parts`: the names in the file. In a layer, they are the parts after `blk.N.`.
    - `values`: a function of the parts, as floats, that returns the tensor. By default, the rows of the parts are
      joined, and quantized weights stay quantized.
    - `rows`, `columns`: functions of the config. They return the order of the rows or columns in transformers, as their
      indices in the file.
    """

    name: str
    parts: Sequence[str]
    values: Callable[[list[torch.Tensor]], torch.Tensor] | None = None
    rows: Callable[[Config], torch.Tensor] | None = None
    columns: Callable[[Config], torch.Tensor] | None = None


def has_whole_groups(columns: torch.Tensor, size: int) -> bool:
    """Whether an order of columns only moves whole groups of `size` columns."""
    groups = columns.view(-1, size) if len(columns) % size == 0 else columns[:0]
    return len(groups) > 0 and bool((groups[:, :1] % size == 0).all() and (groups.diff() == 1).all())


def in_columns(rows: torch.Tensor, columns: torch.Tensor, size: int) -> torch.Tensor:
    """Return the rows of a tensor, or of an operand of a packed weight with groups of `size` columns, in this order."""
    if rows.shape[-1] == len(columns):
        return rows[..., columns]
    groups = rows.unflatten(-1, (len(columns) // size, -1))
    return groups[..., columns[::size] // size, :].flatten(-2)


# Linear attention ------------------------------------------------------------------------


def _value_heads(config: Config) -> torch.Tensor:
    """Return the order of the value heads.

    In transformers, the value heads of a key head are neighbours. In the file, the first value heads of all key heads
    come first.
    """
    return torch.arange(config.linear_num_value_heads).view(-1, config.linear_num_key_heads).T.flatten()


def _values(config: Config) -> torch.Tensor:
    """Return the order of the values of all heads."""
    size = config.linear_value_head_dim
    return (_value_heads(config)[:, None] * size + torch.arange(size)).flatten()


def _queries_keys_values(config: Config) -> torch.Tensor:
    count = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    return torch.cat((torch.arange(count), count + _values(config)))


def _by_key_head(config: Config) -> torch.Tensor:
    """Return the order of the rows that transformers sorts by key heads.

    For each key head, it has the queries, keys, values and gates.
    """
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    parts = torch.arange(2 * keys + 2 * values).split([keys, keys, values, values])
    return torch.cat([part.view(config.linear_num_key_heads, -1) for part in parts], 1).flatten()


def _log_of_negative(parts: list[torch.Tensor]) -> torch.Tensor:
    return (-parts[0]).log().flatten()


QWEN3_NEXT = (
    Recipe("linear_attn.A_log", ["ssm_a"], values=_log_of_negative),
    Recipe("linear_attn.dt_bias", ["ssm_dt.bias"]),
    Recipe("linear_attn.norm.weight", ["ssm_norm.weight"]),
    Recipe("linear_attn.in_proj_qkvz.weight", ["attn_qkv.weight", "attn_gate.weight"], rows=_by_key_head),
)
QWEN3_5 = (
    Recipe("linear_attn.A_log", ["ssm_a"], values=_log_of_negative, rows=_value_heads),
    Recipe("linear_attn.dt_bias", ["ssm_dt.bias"], rows=_value_heads),
    Recipe("linear_attn.norm.weight", ["ssm_norm.weight"]),
    Recipe("linear_attn.conv1d.weight", ["ssm_conv1d.weight"], rows=_queries_keys_values),
    Recipe("linear_attn.in_proj_qkv.weight", ["attn_qkv.weight"], rows=_queries_keys_values),
    Recipe("linear_attn.in_proj_z.weight", ["attn_gate.weight"], rows=_values),
    Recipe("linear_attn.in_proj_a.weight", ["ssm_alpha.weight"], rows=_value_heads),
    Recipe("linear_attn.in_proj_b.weight", ["ssm_beta.weight"], rows=_value_heads),
    Recipe("linear_attn.out_proj.weight", ["ssm_out.weight"], columns=_values),
)

# Mamba 2 ---------------------------------------------------------------------------------

GRANITE_HYBRID = (
    Recipe("mamba.A_log", ["ssm_a"], values=_log_of_negative),
    Recipe("mamba.D", ["ssm_d"]),
    Recipe("mamba.dt_bias", ["ssm_dt.bias"]),
    Recipe("mamba.norm.weight", ["ssm_norm.weight"]),
    Recipe("shared_mlp.input_linear.weight", ["ffn_gate_shexp.weight", "ffn_up_shexp.weight"]),
    Recipe("shared_mlp.input_linear.weight", ["ffn_gate.weight", "ffn_up.weight"]),
    Recipe("shared_mlp.output_linear.weight", ["ffn_down.weight"]),
)

# Others ----------------------------------------------------------------------------------


def _latent_projection(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join the projections of the latents to keys [H, R, K] and to values [H, V, R]."""
    keys, values = parts
    return torch.cat((keys.mT, values), 1).flatten(0, 1)


LATENT = (Recipe("self_attn.kv_b_proj.weight", ["attn_k_b.weight", "attn_v_b.weight"], values=_latent_projection),)


def _matrix(index: int) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    return lambda parts: parts[0][index]


# The files have one tensor for the matrices of all inputs but the first. llama.cpp knows models with 4 inputs only.
GEMMA3N = tuple(
    Recipe(f"model.altup_{name}projections.{i}.weight", [f"altup_{part}proj.weight"], values=_matrix(i))
    for name, part in (("", ""), ("unembed_", "unembd_"))
    for i in range(3)
)
GEMMA4 = (Recipe("router.scale", ["ffn_gate_inp.scale"]), Recipe("router.per_expert_scale", ["ffn_down_exps.scale"]))
