"""The architectures of GGUF files, and how transformers stores the same models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .recipes import GEMMA3N, GEMMA4, GRANITE_HYBRID, LATENT, QWEN3_5, QWEN3_NEXT, Recipe

if TYPE_CHECKING:
    from .file import GGUFFile


@dataclass(frozen=True)
class Architecture:
    """How an architecture of GGUF is stored in transformers.

    - `kind`: the kind of the model in transformers.
    - `is_permuted`: whether llama.cpp has reordered the rows of the query and key projections. Its rotary embedding
      then combines neighbouring rows of a head, and that of transformers row i with row i + D / 2.
    - `has_offset_norms`: whether the file has the weights of the norms with 1 added.
    - `rotates_part`: whether the rotary embedding may leave out dimensions of a head.
    - `keys`: keys of the metadata, after the name of the architecture → names in the config, besides `KEYS`.
    - `values`: values of the config that the metadata lacks.
    - `biases`: names in the config, each of which says whether some layers have biases → a tensor that the file has if
      they have biases.
    - `names`: parts of names in transformers → what the package `gguf` knows instead.
    - `recipes`: how to make tensors that differ by more than their names.
    - `settings`: a function of the file that returns more values of the config.
    """

    kind: str
    is_permuted: bool = False
    has_offset_norms: bool = False
    rotates_part: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    recipes: Sequence[Recipe] = ()
    settings: Callable[[GGUFFile], dict[str, Any]] = lambda file: {}


# A key of the metadata, after the name of the architecture → the name in the config of transformers.
KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "rope.freq_base": "rope_theta",
}
_EPSILON = "attention.layer_norm_epsilon"
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_LOGIT_SCALE = {_EPSILON: "layer_norm_eps", "logit_scale": "logit_scale"}
_SHARED_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_LINEAR_ATTENTION = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_LAYER_INPUTS = {
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
}
_SHORT_CONVOLUTIONS = {"shortconv.l_cache": "conv_L_cache", "attention.layer_norm_rms_epsilon": "norm_eps"}
_GRANITE_EXPERTS = {"block_sparse_moe.router": "mlp.gate", "block_sparse_moe.experts": "mlp.experts"}
# The bias of a router, whose name lacks the point before `bias` in transformers.
_CORRECTION = {"e_score_correction_bias": "e_score_correction.bias"}


def _layer_types(file: GGUFFile, tensor: str, kind: str, other: str) -> dict[str, Any]:
    """Return the kinds of the layers: `kind` if the layer has `tensor`, else `other`."""
    return {"layer_types": [kind if file.has(f"blk.{i}.{tensor}") else other for i in range(file.layer_count)]}


def windows(file: GGUFFile) -> list[bool] | None:
    """Return for each layer whether it has a sliding window, or None if the file does not say it.

    The file may have a number N instead: each Nth layer has no window. If N is 0, all layers have one.
    """
    pattern = file.get("attention.sliding_window_pattern")
    if pattern is None or isinstance(pattern, list):
        return pattern
    return [pattern == 0 or (i + 1) % pattern != 0 for i in range(file.layer_count)]


def _exaone4(file: GGUFFile) -> dict[str, Any]:
    """Small models have no windows, and rotate the queries and keys of all layers."""
    if file.get("attention.sliding_window"):
        return {}
    return {"sliding_window": None, "layer_types": ["full_attention"] * file.layer_count}


def _olmo(file: GGUFFile) -> dict[str, Any]:
    """Files of Olmo 3 differ from those of Olmo 2 by their windows. Their layers with windows have no scaling."""
    if not file.get("attention.sliding_window"):
        return {}
    rope = {"rope_type": "default", "rope_theta": file.require("rope.freq_base")}
    return {
        "model_type": "olmo3",
        "rope_parameters": {kind: dict(rope) for kind in ("sliding_attention", "full_attention")},
    }


def _short_convolutions(file: GGUFFile) -> dict[str, Any]:
    return _layer_types(file, "shortconv.conv.weight", "conv", "full_attention")


def _linear_attention(file: GGUFFile) -> dict[str, Any]:
    size = file.require("ssm.inner_size") // file.require("ssm.time_step_rank")
    return {"linear_value_head_dim": size} | _layer_types(file, "ssm_a", "linear_attention", "full_attention")


def _granite_hybrid(file: GGUFFile) -> dict[str, Any]:
    size = file.require("ssm.inner_size")
    dense = file.get("feed_forward_length")
    return _layer_types(file, "ssm_a", "mamba", "attention") | {
        "mamba_d_head": size // file.require("ssm.time_step_rank"),
        "mamba_expand": size // file.require("embedding_length"),
        "mamba_conv_bias": file.has_any("ssm_conv1d.bias"),
        "mamba_proj_bias": file.has_any("ssm_in.bias"),
        "shared_intermediate_size": file.get("expert_shared_feed_forward_length", dense),
        "position_embedding_type": "rope" if file.get("rope.scaling.finetuned") else "nope",
        "num_local_experts": file.get("expert_count", 0),
        "num_experts_per_tok": file.get("expert_used_count", 0),
    }


def _normalized_experts(file: GGUFFile) -> dict[str, Any]:
    return {"norm_topk_prob": bool(file.get("expert_weights_norm", False))}


def _latent_attention(file: GGUFFile) -> dict[str, Any]:
    """Older files lack the sizes of keys and values for `MLA`, and have them without this ending."""
    rotated = file.require("rope.dimension_count")
    keys = file.get("attention.key_length_mla") or file.require("attention.key_length")
    has_softmax = file.get("expert_count") and not file.has_any("exp_probs_b.bias")
    return _normalized_experts(file) | {
        "model_type": "deepseek_v2" if has_softmax else "deepseek_v3",
        "topk_method": "group_limited_greedy" if file.get("expert_group_count", 1) > 1 else "greedy",
        "num_key_value_heads": file.require("attention.head_count"),
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "kv_lora_rank": file.require("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys - rotated,
        "v_head_dim": file.get("attention.value_length_mla") or file.require("attention.value_length"),
        "head_dim": rotated,
    }


def _gemma3n(file: GGUFFile) -> dict[str, Any]:
    scales = torch.tensor(file.require("activation_sparsity_scale"))
    return {
        "laurel_rank": file.row_count("blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": torch.distributions.Normal(0, 1).cdf(scales).tolist(),
        "vocab_size_per_layer_input": file.row_count("per_layer_token_embd.weight"),
    }


def _gemma4(file: GGUFFile) -> dict[str, Any]:
    file.require("attention.sliding_window_pattern")
    has_window = windows(file)
    with_window, without = (has_window.index(kind) for kind in (True, False))
    heads, sizes = file.require("attention.head_count_kv"), file.get("feed_forward_length")
    heads = heads if isinstance(heads, list) else [heads] * len(has_window)
    sizes = sizes if isinstance(sizes, list) else [sizes] * len(has_window)
    per_layer = file.get("embedding_length_per_layer_input", 0)
    experts = file.get("expert_count", 0)
    return {
        "head_dim": file.require("attention.key_length_swa"),
        "global_head_dim": file.require("attention.key_length"),
        "num_key_value_heads": heads[with_window],
        "num_global_key_value_heads": heads[without],
        "attention_k_eq_v": not file.has(f"blk.{without}.attn_v.weight"),
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "hidden_size_per_layer_input": per_layer,
        "vocab_size_per_layer_input": file.row_count("per_layer_token_embd.weight") if per_layer else 1,
        "enable_moe_block": experts > 0,
        "top_k_experts": file.get("expert_used_count"),
    }


# The name of an architecture in GGUF → how transformers stores it.
ARCHITECTURES = {
    "arcee": Architecture("arcee", is_permuted=True),
    "cohere2": Architecture("cohere2", keys=_LOGIT_SCALE),
    "command-r": Architecture("cohere", keys=_LOGIT_SCALE, biases={"use_qk_norm": "blk.0.attn_q_norm.weight"}),
    "deepseek2": Architecture(
        "deepseek_v3", keys=_SHARED_EXPERTS, names=_CORRECTION, recipes=LATENT, settings=_latent_attention
    ),
    "dots1": Architecture("dots1", keys=_SHARED_EXPERTS, names=_CORRECTION, settings=_normalized_experts),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": "blk.0.attn_q.bias"}),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        biases={"use_bias": "blk.0.attn_q.bias"},
        keys={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        names={"mlp.gate.moe_statics.e_score_correction_bias": "mlp.moe_statics.e_score_correction.bias"},
    ),
    "exaone4": Architecture("exaone4", settings=_exaone4),
    "gemma": Architecture("gemma", has_offset_norms=True),
    "gemma2": Architecture("gemma2", has_offset_norms=True),
    "gemma3": Architecture("gemma3_text", has_offset_norms=True),
    "gemma3n": Architecture(
        "gemma3n_text",
        recipes=GEMMA3N,
        settings=_gemma3n,
        keys=_LAYER_INPUTS | {f"altup.{name}": f"altup_{name}" for name in ("active_idx", "num_inputs")},
    ),
    "gemma4": Architecture("gemma4_text", keys=_LAYER_INPUTS, recipes=GEMMA4, settings=_gemma4),
    "glm4": Architecture("glm4", rotates_part=True, biases=_ATTENTION_BIAS),
    "glm4moe": Architecture(
        "glm4_moe",
        rotates_part=True,
        keys=_SHARED_EXPERTS,
        names=_CORRECTION,
        settings=_normalized_experts,
        biases=_ATTENTION_BIAS | {"use_qk_norm": "blk.0.attn_q_norm.weight"},
    ),
    "gpt-oss": Architecture("gpt_oss", names={"mlp.router": "mlp.gate"}),
    "granite": Architecture("granite", is_permuted=True, keys=_SCALES, biases=_ATTENTION_BIAS),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        is_permuted=True,
        keys=_SCALES | _MAMBA,
        biases=_ATTENTION_BIAS,
        names=_GRANITE_EXPERTS,
        recipes=GRANITE_HYBRID,
        settings=_granite_hybrid,
    ),
    "granitemoe": Architecture(
        "granitemoe",
        is_permuted=True,
        keys=_SCALES | {"expert_count": "num_local_experts"},
        biases=_ATTENTION_BIAS,
        names=_GRANITE_EXPERTS,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", biases=_ATTENTION_BIAS),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe",
        biases=_ATTENTION_BIAS,
        keys={"expert_used_count": "moe_topk", "expert_shared_count": "num_shared_expert"},
    ),
    "lfm2": Architecture(
        "lfm2", keys=_SHORT_CONVOLUTIONS, values={"block_auto_adjust_ff_dim": False}, settings=_short_convolutions
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        keys=_SHORT_CONVOLUTIONS | {"leading_dense_block_count": "num_dense_layers"},
        names={"expert_bias": "expert_bias.bias"},
        settings=_short_convolutions,
    ),
    "llama": Architecture("llama", is_permuted=True, biases=_ATTENTION_BIAS | {"mlp_bias": "blk.0.ffn_up.bias"}),
    "minimax-m2": Architecture(
        "minimax_m2",
        rotates_part=True,
        keys={"expert_count": "num_local_experts"},
        names={
            "mlp.gate": "block_sparse_moe.gate",
            "mlp.e_score_correction_bias": "block_sparse_moe.e_score_correction.bias",
        },
    ),
    "mistral3": Architecture("ministral3", is_permuted=True),
    "nemotron": Architecture(
        "nemotron", has_offset_norms=True, rotates_part=True, keys={_EPSILON: "norm_eps"}, biases=_ATTENTION_BIAS
    ),
    "olmo": Architecture("olmo", is_permuted=True, keys={"attention.clamp_kqv": "clip_qkv"}, biases=_ATTENTION_BIAS),
    "olmo2": Architecture("olmo2", settings=_olmo),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi", rotates_part=True, keys={_EPSILON: "layer_norm_eps"}),
    "phi3": Architecture("phi3", rotates_part=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen2vl": Architecture("qwen2"),  # for text alone
    "qwen3": Architecture("qwen3", biases=_ATTENTION_BIAS),
    "qwen3moe": Architecture("qwen3_moe", values={"norm_topk_prob": True}),
    "qwen35": Architecture(
        "qwen3_5_text",
        has_offset_norms=True,
        rotates_part=True,
        keys=_LINEAR_ATTENTION,
        recipes=QWEN3_5,
        settings=_linear_attention,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        has_offset_norms=True,
        rotates_part=True,
        keys=_LINEAR_ATTENTION,
        recipes=QWEN3_5,
        settings=_linear_attention,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        has_offset_norms=True,
        rotates_part=True,
        keys=_LINEAR_ATTENTION,
        recipes=QWEN3_NEXT,
        settings=_linear_attention,
    ),
    "qwen3vl": Architecture("qwen3"),  # for text alone
    "qwen3vlmoe": Architecture("qwen3_moe", values={"norm_topk_prob": True}),  # for text alone
    "seed_oss": Architecture("seed_oss", biases=_ATTENTION_BIAS | {"attention_out_bias": "blk.0.attn_output.bias"}),
    "smollm3": Architecture("smollm3", is_permuted=True),
    "stablelm": Architecture(
        "stablelm",
        rotates_part=True,
        biases={"use_qkv_bias": "blk.0.attn_q.bias"},
        keys={_EPSILON: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
    ),
    "starcoder2": Architecture("starcoder2", keys={_EPSILON: "norm_epsilon"}, biases={"use_bias": "blk.0.attn_q.bias"}),
}
# Architectures that may have experts → how transformers stores them then.
WITH_EXPERTS = {"llama": Architecture("mixtral", is_permuted=True)} | {
    name: ARCHITECTURES[name]
    for name in (
        "deepseek2",
        "dots1",
        "ernie4_5-moe",
        "gemma4",
        "glm4moe",
        "gpt-oss",
        "granitehybrid",
        "granitemoe",
        "hunyuan-moe",
        "lfm2moe",
        "minimax-m2",
        "olmoe",
        "qwen2moe",
        "qwen35moe",
        "qwen3moe",
        "qwen3next",
        "qwen3vlmoe",
    )
}
