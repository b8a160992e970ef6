"""Checkpoints of small Qwen models with states and a head for multi-token prediction. Their tensors and configs have
the names used on the hub."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from test_state_families import DELTA, EXPERTS, SMALL

LAYERS = ["linear_attention", "full_attention"]
QWEN = SMALL | DELTA | dict(hidden_size=64, num_hidden_layers=len(LAYERS), layer_types=LAYERS, initializer_range=0.2)
MOE = EXPERTS | dict(shared_expert_intermediate_size=32)
VOCABULARY, HIDDEN = QWEN["vocab_size"], QWEN["hidden_size"]

# Name → model class, class of the text config, changes of QWEN, class of the config with a text config, or None.
MODELS = {
    "qwen3_next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig, MOE, None),
    "qwen3_5": (hf.Qwen3_5ForCausalLM, hf.Qwen3_5TextConfig, {}, hf.Qwen3_5Config),
    "qwen3_5_moe": (hf.Qwen3_5MoeForCausalLM, hf.Qwen3_5MoeTextConfig, MOE, hf.Qwen3_5MoeConfig),
}


def make(name: str, folder: Path, *, layer_scale: float = 1.0) -> Path:
    """Write a random checkpoint to `folder`, and return `folder`.

    `layer_scale` multiplies what the layers of the model add to its hidden states. If it is small, the model and the
    head predict from the embedding of the last token. Most guesses of the head are then right, and some are wrong.
    """
    torch.manual_seed(3)
    kind, config_class, changes, outer = MODELS[name]
    config = config_class(**QWEN | changes)
    model = kind(config).eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for key in tensors:
        if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")):
            tensors[key] = tensors[key] * layer_scale
    number = f"layers.{len(LAYERS) - 1}."
    last = next(key.partition(number)[0] + number for key in tensors if number in key)
    head = {key.replace(last, "mtp.layers.0."): value for key, value in tensors.items() if key.startswith(last)}
    head = {key: value.flip(0) if value.dim() > 1 else value.clone() for key, value in head.items()}
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[f"mtp.{norm}.weight"] = torch.zeros(HIDDEN)  # these models add 1 to the weight of a norm
    mixed = torch.randn(HIDDEN, 2 * HIDDEN) / 8
    head["mtp.fc.weight"] = torch.eye(HIDDEN, 2 * HIDDEN) if layer_scale < 1 else mixed
    if outer is not None:  # the text model is part of a model for images
        tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in tensors.items()}
        inner = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
        config = outer(text_config=inner).to_dict() | {
            "architectures": [outer.__name__.replace("Config", "ForConditionalGeneration")]
        }
        (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: value.contiguous() for key, value in (tensors | head).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
