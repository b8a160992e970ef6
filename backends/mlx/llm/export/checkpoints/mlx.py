"""Folders of mlx-lm. Packed weights stay packed. Tensors get the names and layouts of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from ..experts import use_gathered_experts
from .hf import HFFolder, object_in
from .install import Tensors, float_weight, install_all, renamed, submodule

# The prefix of the tensors that belong to the language model, in a checkpoint for text and other media.
_LANGUAGE_MODEL = "language_model."
# A pattern in mlx-lm's name of a tensor → its replacement in transformers, for all models and for models of one kind.
_RENAMED = {
    r"\.switch_mlp\.fc1\.": ".experts.up_proj.",
    r"\.switch_mlp\.fc2\.": ".experts.down_proj.",
    r"\.switch_(mlp|glu)\.": ".experts.",
}
_RENAMED_IN = {
    "granitemoehybrid": {r"\.mlp\.down_proj\.": ".shared_mlp.output_linear."},
    "lfm2_moe": {
        r"\.feed_forward\.gate_proj\.": ".feed_forward.w1.",
        r"\.feed_forward\.down_proj\.": ".feed_forward.w2.",
        r"\.feed_forward\.up_proj\.": ".feed_forward.w3.",
    },
}
# The kind of a model → mlx-lm's names of two weights, and the weight in transformers that has the rows of both.
_JOINED_IN = {"granitemoehybrid": (".mlp.gate_proj", ".mlp.up_proj", ".shared_mlp.input_linear")}
# Norms that add 1 to their weights in transformers. In mlx-lm, the weights include this 1.
_OFFSET_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
# The kind of a model → the end of the names of tensors that folders of mlx-lm lack. They are 0.
_ZERO_IN = {"ernie4_5_moe": ".e_score_correction_bias"}
# The largest element and the largest scale of NVFP4, multiplied. MLX's `global_scale` is the largest value of a weight.
_NVFP4_LIMIT = 6.0 * 448.0
# Kinds of models whose weights cannot be used. mlx-lm multiplies those of falcon_h1 by factors of the config.
_REFUSED = ("falcon_h1",)


def is_mlx(folder: Path, config: dict) -> bool:
    """Whether mlx-lm wrote the checkpoint in `folder`, quantized or not. `config` is the content of `config.json`."""
    if "group_size" in object_in(config, "quantization"):
        return True
    file = min(folder.glob("model*.safetensors"), default=None)
    if file is None:
        return False
    try:
        with safe_open(file, "pt") as opened:
            return (opened.metadata() or {}).get("format") == "mlx"
    except SafetensorError:  # `load` says what is wrong
        return False


class MLXFolder(HFFolder):
    """A folder of mlx-lm."""

    def _load(self, dtype: torch.dtype | None) -> PreTrainedModel:
        tensors = self.tensors()
        is_part = any(name.startswith(_LANGUAGE_MODEL) for name in tensors)
        model = use_gathered_experts(self.empty_model(text_only=is_part))
        if (kind := model.config.model_type) in _REFUSED:
            raise ValueError(
                f"load_causal_lm: {self.path}: got weights of kind {kind} from mlx-lm, expected a Hugging Face "
                "checkpoint"
            )
        if is_part:
            tensors = {n.removeprefix(_LANGUAGE_MODEL): t for n, t in tensors.items() if n.startswith(_LANGUAGE_MODEL)}
        return install_all(model, _in_layout_of(model, tensors), self.path)

    def head(self, model: PreTrainedModel) -> None:
        return None

    def check(self) -> None:
        pass


def _in_layout_of(model: PreTrainedModel, tensors: Tensors) -> Tensors:
    """Return `tensors` by their names and in their layouts in `model`."""
    kind = model.config.model_type
    for name in [name for name in tensors if name.endswith(".global_scale")]:
        tensors[name.removesuffix("global_scale") + "factor"] = tensors.pop(name) / _NVFP4_LIMIT
    tensors = renamed(tensors, model, _RENAMED | _RENAMED_IN.get(kind, {}))
    if kind in _JOINED_IN:
        _join_rows(tensors, *_JOINED_IN[kind])
    _join_latent_projections(model, tensors)
    if kind in _ZERO_IN:
        missing = {name: x for name, x in model.state_dict().items() if name.endswith(_ZERO_IN[kind])}
        tensors |= {name: torch.zeros(x.shape) for name, x in missing.items() if name not in tensors}
    for path, module in model.named_modules():
        if f"{path}.weight" in tensors:
            _change_layout(module, f"{path}.weight", tensors)
    for name, expected in model.state_dict().items():
        if expected.numel() == 1 and name in tensors and tensors[name].dim() == 0:  # such as Apertus' activation
            tensors[name] = tensors[name].reshape(expected.shape)
    return tensors


def _join_rows(tensors: Tensors, first: str, second: str, joined: str) -> None:
    """Concatenate the rows of the weights `first` and `second` of each layer in `tensors`, in place."""
    for name in [name for name in tensors if f"{first}." in name]:
        parts = tensors.pop(name), tensors.pop(name.replace(first, second))
        tensors[name.replace(first, joined)] = torch.cat(parts)


def _join_latent_projections(model: PreTrainedModel, tensors: Tensors) -> None:
    """Compute the weights `kv_b_proj` of latent attention in `tensors`, in place.

    mlx-lm has two weights for each of the H heads: `embed_q` [H, R, K] and `unembed_out` [H, V, R].
    """
    for name in [name for name in tensors if name.endswith(".embed_q.weight")]:
        path = name.removesuffix(".embed_q.weight")
        attention = submodule(model, path, name)
        key = float_weight(tensors, f"{path}.embed_q", attention.qk_nope_head_dim)
        value = float_weight(tensors, f"{path}.unembed_out", attention.kv_lora_rank)
        tensors[f"{path}.kv_b_proj.weight"] = torch.cat((key.mT, value), 1).flatten(0, 1)


def _change_layout(module: torch.nn.Module, name: str, tensors: Tensors) -> None:
    """Change the tensor `name`, the weight of `module`, from mlx-lm's layout to that of transformers."""
    if isinstance(module, torch.nn.Conv1d):
        tensors[name] = tensors[name].mT.contiguous()  # from [outputs, size of the kernel, inputs]
    elif type(module).__name__ in _OFFSET_NORMS:
        tensors[name] = tensors[name].float() - 1
