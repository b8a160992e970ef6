"""The architectures of GGUF files, and how transformers stores the same models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """

    kind: str
    is_permuted: bool = False
    has_offset_norms: bool = False
    rotates_part: bool = False
    keys: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


# A key of the metadata, after the name of the architecture → the name in the config of transformers.
KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
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

# The name of an architecture in GGUF → how transformers stores it.
ARCHITECTURES = {
    "arcee": Architecture("arcee", is_permuted=True),
    "cohere2": Architecture("cohere2", keys=_LOGIT_SCALE),
    "command-r": Architecture("cohere", keys=_LOGIT_SCALE, biases={"use_qk_norm": "blk.0.attn_q_norm.weight"}),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": "blk.0.attn_q.bias"}),
    "exaone4": Architecture("exaone4"),
    "gemma": Architecture("gemma", has_offset_norms=True),
    "gemma2": Architecture("gemma2", has_offset_norms=True),
    "gemma3": Architecture("gemma3_text", has_offset_norms=True),
    "glm4": Architecture("glm4", rotates_part=True, biases=_ATTENTION_BIAS),
    "gpt-oss": Architecture("gpt_oss", names={"mlp.router": "mlp.gate"}),
    "granite": Architecture("granite", is_permuted=True, keys=_SCALES, biases=_ATTENTION_BIAS),
    "granitemoe": Architecture(
        "granitemoe", is_permuted=True, keys=_SCALES | {"expert_count": "num_local_experts"}, biases=_ATTENTION_BIAS,
        names={"block_sparse_moe.router": "mlp.gate", "block_sparse_moe.experts": "mlp.experts"},
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", biases=_ATTENTION_BIAS),
    "llama": Architecture("llama", is_permuted=True, biases=_ATTENTION_BIAS | {"mlp_bias": "blk.0.ffn_up.bias"}),
    "mistral3": Architecture("ministral3", is_permuted=True),
    "nemotron": Architecture(
        "nemotron", has_offset_norms=True, rotates_part=True, keys={_EPSILON: "norm_eps"}, biases=_ATTENTION_BIAS
    ),
    "olmo2": Architecture("olmo2"),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi", rotates_part=True, keys={_EPSILON: "layer_norm_eps"}),
    "phi3": Architecture("phi3", rotates_part=True),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen2vl": Architecture("qwen2"),  # for text alone
    "qwen3": Architecture("qwen3", biases=_ATTENTION_BIAS),
    "qwen3moe": Architecture("qwen3_moe", values={"norm_topk_prob": True}),
    "qwen3vl": Architecture("qwen3"),  # for text alone
    "qwen3vlmoe": Architecture("qwen3_moe", values={"norm_topk_prob": True}),  # for text alone
    "seed_oss": Architecture("seed_oss", biases=_ATTENTION_BIAS | {"attention_out_bias": "blk.0.attn_output.bias"}),
    "smollm3": Architecture("smollm3", is_permuted=True),
    "stablelm": Architecture(
        "stablelm", rotates_part=True, biases={"use_qkv_bias": "blk.0.attn_q.bias"},
        keys={_EPSILON: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"},
    ),
    "starcoder2": Architecture("starcoder2", keys={_EPSILON: "norm_epsilon"}, biases={"use_bias": "blk.0.attn_q.bias"}),
}  # fmt: skip
# Architectures that may have experts → how transformers stores them then.
WITH_EXPERTS = {"llama": Architecture("mixtral", is_permuted=True)} | {
    name: ARCHITECTURES[name] for name in ("gpt-oss", "granitemoe", "olmoe", "qwen2moe", "qwen3moe", "qwen3vlmoe")
}
