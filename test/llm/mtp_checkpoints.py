"""Checkpoints of small models with a head for multi-token prediction. Their tensors have the names used on the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Glm4MoeConfig, Glm4MoeForCausalLM

VOCABULARY, HIDDEN, LAYERS = 96, 64, 2
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
    num_mtp_layers=1,
    tie_word_embeddings=False,
    initializer_range=0.2,
)
MODELS = {
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig, dict(num_key_value_heads=2, head_dim=16)),
    "deepseek_v3": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config,
        dict(
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            v_head_dim=16,
            qk_nope_head_dim=16,
        ),
    ),
}


def make(name: str, folder: Path, *, guesses_right: bool = False) -> Path:
    """Write a random checkpoint to `folder`, and return `folder`. If `guesses_right`, the head guesses right.

    In that case, the layers of the model add nothing, so that the model predicts from the embedding of the last token
    alone. The head predicts from the same embedding, and therefore predicts the same token.
    """
    torch.manual_seed(3)
    kind, config, sizes = MODELS[name]
    model = kind(config(**COMMON, **sizes)).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    last, head = f"model.layers.{LAYERS - 1}.", f"model.layers.{LAYERS}."
    tensors |= {key.replace(last, head): value.flip(0) for key, value in tensors.items() if key.startswith(last)}
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{head}{norm}.weight"] = torch.ones(HIDDEN)
    tensors[f"{head}eh_proj.weight"] = torch.randn(HIDDEN, 2 * HIDDEN) / 8
    tensors[f"{head}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{head}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if guesses_right:
        for key in tensors:
            if "o_proj" in key or "down_proj" in key:
                tensors[key] = torch.zeros_like(tensors[key])
        tensors[f"{head}eh_proj.weight"] = torch.eye(HIDDEN, 2 * HIDDEN)
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
