"""Loads the checkpoints of mlx-lm. Packed weights stay packed. Tensors get the names and layouts of transformers."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from ....custom_ops.packing import FLOAT_MODES, dequantize
from ..packed import MLXLinear, install, is_experts, is_linear, packable_weights, use_linear_layer
from ..weights import OPERANDS, empty_model, finish, read_tensors, submodule

# The prefix of the tensors that belong to the language model, in a checkpoint for text and other media.
_LANGUAGE_MODEL = "language_model."
# The tensors of a packed weight. Some weights in NVFP4 have a factor for the whole weight, or one for each expert.
_PARTS = (*OPERANDS, "factor")
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
# Mixtral's names of the projections of an expert → the names that mlx-lm has for all models.
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
# Norms that add 1 to their weights in transformers. In mlx-lm, the weights include this 1.
_OFFSET_NORMS = ("Qwen3NextRMSNorm", "Qwen3_5RMSNorm", "Qwen3_5MoeRMSNorm")
# The kind of a model → the end of the names of tensors that folders of mlx-lm lack. They are 0.
_ZERO_IN = {"ernie4_5_moe": ".e_score_correction_bias"}
# The largest element and the largest scale of NVFP4, multiplied. MLX's `global_scale` is the largest value of a weight.
_NVFP4_LIMIT = 6.0 * 448.0
# Kinds of models whose weights cannot be used. mlx-lm multiplies those of falcon_h1 by factors of the config.
_REFUSED = ("falcon_h1",)


def load_mlx(folder: Path) -> PreTrainedModel:
    """Return the model in an mlx-lm folder. Raises ValueError if the tensors do not match the model."""
    tensors = read_tensors(folder)
    is_part = any(name.startswith(_LANGUAGE_MODEL) for name in tensors)
    model, config = empty_model(folder, text_only=is_part)
    if (kind := config.model_type) in _REFUSED:
        raise ValueError(
            f"load_causal_lm: {folder}: got weights of kind {kind} from mlx-lm, expected a Hugging Face checkpoint"
        )
    if is_part:
        tensors = {n.removeprefix(_LANGUAGE_MODEL): t for n, t in tensors.items() if n.startswith(_LANGUAGE_MODEL)}
    for name in [name for name in tensors if name.endswith(".global_scale")]:
        tensors[name.removesuffix("global_scale") + "factor"] = tensors.pop(name) / _NVFP4_LIMIT
    tensors = renamed(tensors, model)
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
    return install_all(model, config, tensors, folder)


def install_all(
    model: PreTrainedModel, config: PretrainedConfig, tensors: dict[str, torch.Tensor], folder: Path
) -> PreTrainedModel:
    """Load `tensors` into `model`, and return it.

    A packed layer has a weight, scales, biases and maybe a factor; experts have `gate_proj`, `up_proj` and `down_proj`.
    """
    for path in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".scales")}):
        if ".experts." not in path:
            _install(model, path, tensors)
    for path, module in list(model.named_modules()):
        if is_experts(module):
            _install_experts(model, path, tensors)
    return finish(model, config, tensors, folder)


def stack_experts(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Stack the tensors of the experts of each mixture in `tensors`, in place."""
    for path in [path for path, module in model.named_modules() if is_experts(module)]:
        parts = defaultdict(dict)
        for name in [name for name in tensors if name.startswith(f"{path}.")]:
            expert, _, part = name.removeprefix(f"{path}.").partition(".")
            projection, _, leaf = part.partition(".")
            if expert.isdecimal():
                parts[f"{path}.{_PROJECTIONS.get(projection, projection)}.{leaf}"][int(expert)] = tensors.pop(name)
        for name, experts in parts.items():
            tensors[name] = torch.stack([experts[i] for i in sorted(experts)])


def renamed(tensors: dict[str, torch.Tensor], model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in transformers, without those that `model` ignores."""
    ignored, expected = model._keys_to_ignore_on_load_unexpected or (), model.state_dict()
    patterns = _RENAMED | _RENAMED_IN.get(model.config.model_type, {})
    renamings = [r for r in get_model_conversion_mapping(model) if isinstance(r, WeightRenaming)]
    renamed = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        # The other parts of a weight are renamed like the weight.
        name = f"{path}.weight" if leaf in _PARTS else name
        for pattern, replacement in patterns.items():
            name = re.sub(pattern, replacement, name)
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        if name in expected or not any(re.search(pattern, name) for pattern in ignored):
            if leaf in _PARTS and name.endswith(".weight"):  # the experts of transformers lack this ending
                name = name.removesuffix("weight") + leaf
            renamed[name] = tensor
    return renamed


def _join_rows(tensors: dict[str, torch.Tensor], first: str, second: str, joined: str) -> None:
    """Concatenate the rows of the weights `first` and `second` of each layer in `tensors`, in place."""
    for name in [name for name in tensors if f"{first}." in name]:
        parts = tensors.pop(name), tensors.pop(name.replace(first, second))
        tensors[name.replace(first, joined)] = torch.cat(parts)


def _join_latent_projections(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Compute the weights `kv_b_proj` of latent attention in `tensors`, in place.

    mlx-lm has two weights for each of the H heads: `embed_q` [H, R, K] and `unembed_out` [H, V, R].
    """
    for name in [name for name in tensors if name.endswith(".embed_q.weight")]:
        path = name.removesuffix(".embed_q.weight")
        attention = submodule(model, path, name)
        key = _float_weight(tensors, f"{path}.embed_q", attention.qk_nope_head_dim)
        value = _float_weight(tensors, f"{path}.unembed_out", attention.kv_lora_rank)
        tensors[f"{path}.kv_b_proj.weight"] = torch.cat((key.mT, value), 1).flatten(0, 1)


def _float_weight(tensors: dict[str, torch.Tensor], path: str, columns: int) -> torch.Tensor:
    """Remove a weight, which may be packed, from `tensors`, and return it as floats."""
    factor, operands = tensors.pop(f"{path}.factor", None), _take(tensors, path)
    if operands[1] is None:
        return operands[0]
    weight = dequantize(*operands, **_quantization(operands, columns, path))
    return weight if factor is None else weight * factor.reshape(-1, *[1] * (weight.dim() - 1))


def _take(tensors: dict[str, torch.Tensor], path: str) -> list[torch.Tensor | None]:
    """Remove the weight, scales and biases of a layer from `tensors` and return them. A missing tensor is None."""
    return [tensors.pop(f"{path}.{name}", None) for name in OPERANDS]


def _quantization(operands: list[torch.Tensor | None], columns: int, path: str) -> dict:
    """Return the bits, group size and mode of a packed weight with `columns` columns.

    They are computed from the shapes, because the values in the config may not hold for every layer.
    Raises ValueError if MLX has no such format.
    """
    weight, scales, _ = operands
    if weight is None or scales is None:
        raise ValueError(f"{path}: expected both a weight and its scales")
    bits, group_size = weight.shape[-1] * 32 // columns, columns // scales.shape[-1]
    mode = "affine"
    if scales.dtype == torch.uint8:
        mode = next((m for m, (b, size) in FLOAT_MODES.items() if (b, size) == (bits, group_size)), None)
    if mode is None:
        raise ValueError(
            f"{path}: got {bits} bits in groups of {group_size} with uint8 scales, expected {', '.join(FLOAT_MODES)}"
        )
    return {"bits": bits, "group_size": group_size, "mode": mode}


def _install(model: PreTrainedModel, path: str, tensors: dict[str, torch.Tensor]) -> None:
    """Replace the layer at `path` by a packed layer with the tensors of the checkpoint.

    If the layer cannot be packed, such as a router, its weight is dequantized and put into `tensors`. The same holds
    for a weight with a factor in another layer than a linear one. Removes the packed tensors from `tensors`.
    """
    module = submodule(model, path, f"{path}.weight")
    if type(module) is Conv1D:
        module = use_linear_layer(model, path)
    columns = module.weight.shape[-1]
    if not packable_weights(module) or f"{path}.factor" in tensors and not is_linear(module):
        tensors[f"{path}.weight"] = _float_weight(tensors, path, columns)
        return
    factor, operands = tensors.pop(f"{path}.factor", None), _take(tensors, path)
    quantization = _quantization(operands, columns, path)
    if factor is not None:
        quantization["factor"] = factor
    packed = install(model, path, "weight", *operands, **quantization)
    # A layer may have a bias in the checkpoint alone. A bias that is missing there is found with the other tensors.
    if isinstance(packed, MLXLinear) and (bias := tensors.pop(f"{path}.bias", None)) is not None:
        packed.bias = torch.nn.Parameter(bias, requires_grad=False)


def _install_experts(model: PreTrainedModel, path: str, tensors: dict[str, torch.Tensor]) -> None:
    """Install the weights of the experts at `path` if they are packed. Otherwise, put them into `tensors`.

    transformers has one weight for the gate and up projections, and mlx-lm has two.
    """
    module = model.get_submodule(path)
    for name in packable_weights(module):
        if f"{path}.{name}" in tensors:  # floats in the layout of transformers
            continue
        parts = [f"{path}.{part}" for part in (("gate_proj", "up_proj") if name == "gate_up_proj" else (name,))]
        rows = getattr(module, name)
        columns = rows.shape[-2 if module.is_transposed else -1]
        for part in parts:
            if f"{part}.factor" in tensors:  # packed experts have none
                tensors[f"{part}.weight"] = _float_weight(tensors, part, columns)
        operands = [_joined(module, part) for part in zip(*(_take(tensors, part) for part in parts))]
        if module.has_bias:
            tensors[f"{path}.{name}_bias"] = _joined(module, [tensors.pop(f"{part}.bias", None) for part in parts])
        if operands[1] is None:
            tensors[f"{path}.{name}"] = operands[0].mT if module.is_transposed else operands[0]
            continue
        install(model, path, name, *operands, **_quantization(operands, columns, f"{path}.{name}"))


def _joined(experts: torch.nn.Module, parts) -> torch.Tensor | None:
    """Return the rows [E, N, ...] of the parts of a weight as one tensor, or None if a part is missing."""
    if any(part is None for part in parts):
        return None
    return torch.cat(parts, 1) if experts.is_concatenated else torch.stack(parts, 2).flatten(1, 2)


def _change_layout(module: torch.nn.Module, name: str, tensors: dict[str, torch.Tensor]) -> None:
    """Change the tensor `name`, the weight of `module`, from mlx-lm's layout to that of transformers."""
    if isinstance(module, torch.nn.Conv1d):
        tensors[name] = tensors[name].mT.contiguous()  # from [outputs, size of the kernel, inputs]
    elif type(module).__name__ in _OFFSET_NORMS:
        tensors[name] = tensors[name].float() - 1
