"""Puts the tensors of a checkpoint into a model without weights: mlx-lm, quantized and GGUF formats end with it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.pytorch_utils import Conv1D

from ....custom_ops.packing import FLOAT_MODES, dequantize
from ..packed import OPERANDS, MLXLinear, Packed, install, is_experts, is_linear, packable_weights, use_linear_layer
from .checks import shortened
from .language_part import is_tied

# The tensors of a packed weight. Some weights in NVFP4 have a factor for the whole weight, or one for each expert.
_PARTS = (*OPERANDS, "factor")
# Mixtral's names of the projections of an expert → the names that mlx-lm has for all models.
_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

Tensors = dict[str, torch.Tensor]


def install_all(model: PreTrainedModel, tensors: Tensors, folder: Path) -> PreTrainedModel:
    """Load `tensors`, the tensors of all layers, and the generation config in `folder` into `model`, and return it.

    A packed layer has a weight, scales, biases and maybe a factor; experts have `gate_proj`, `up_proj` and `down_proj`.
    """
    for path in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".scales")}):
        if ".experts." not in path:
            _install(model, path, tensors)
    for path, module in list(model.named_modules()):
        if is_experts(module):
            _install_experts(model, path, tensors)
    return finish(model, tensors, folder)


def finish(model: PreTrainedModel, tensors: Tensors, folder: Path | None = None) -> PreTrainedModel:
    """Load the tensors that are not packed, and the generation config in `folder`, into `model`, and return it.

    The packed layers of `model` are already installed.
    """
    _tie(model, tensors)
    _load_unpacked(model, tensors)
    _compute_buffers(model)
    if folder is not None:
        set_generation_config(model, folder)
    return model


def set_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _tie(model: PreTrainedModel, tensors: Tensors) -> None:
    """Make a tied output projection use the packed weight of the embedding, unless `tensors` has a weight for it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ties = is_tied(model.config) or is_tied(model.config.get_text_config())
    if ties and isinstance(embedding, Packed) and not isinstance(head, Packed):
        (path,) = (path for path, module in model.named_modules() if module is head)
        if f"{path}.weight" in tensors:
            return
        *operands, group_size, bits, mode = embedding.packed_arguments()
        install(model, path, "weight", *operands, group_size=group_size, bits=bits, mode=mode)


def _load_unpacked(model: PreTrainedModel, tensors: Tensors) -> None:
    """Load `tensors`, the tensors that are not packed, into `model`, and freeze all parameters.

    Raises ValueError if the tensors do not match the model.
    """
    expected = {name: t.shape for name, t in model.state_dict().items()}
    wrong = [
        f"{name}: got {[*t.shape]}, expected {[*expected[name]]}"
        for name, t in tensors.items()
        if expected.get(name, t.shape) != t.shape
    ]
    if wrong:
        raise ValueError(f"load_causal_lm: wrong shapes for {type(model).__name__}: {shortened(wrong)}")
    _, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    missing = {name for name, t in model.state_dict().items() if t.is_meta}
    if not any(isinstance(m, Packed) for m in (model.get_input_embeddings(), model.get_output_embeddings())):
        # Configs often say that weights are tied that are not. With the missing names, weights with tensors of their
        # own stay as they are.
        model.tie_weights(missing_keys=missing)
    unexpected = [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(f"load_causal_lm: {problem} tensors for {type(model).__name__}: {shortened(names)}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for tensor in model.state_dict(keep_vars=True).values():  # also the buffers, such as the biases of routers
        tensor._is_hf_initialized = True


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that a checkpoint does not store, with the model's own initialization.

    The initialization skips the tensors that `_load_unpacked` has loaded, because it has marked them as initialized.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()


def submodule(model: PreTrainedModel, path: str, tensor: str) -> torch.nn.Module:
    """Return the module of `model` to which `tensor` belongs. Raises ValueError if there is none at `path`."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{tensor}: {type(model).__name__} has no module {path}") from error


def renamed(tensors: Tensors, model: PreTrainedModel, patterns: Mapping[str, str] = {}) -> Tensors:
    """Return the tensors by their names in transformers, without those that `model` ignores.

    `patterns` maps patterns in the names of the checkpoint to replacements, before those of transformers.
    """
    ignored, expected = model._keys_to_ignore_on_load_unexpected or (), model.state_dict()
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


def stack_experts(model: PreTrainedModel, tensors: Tensors) -> None:
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


def float_weight(tensors: Tensors, path: str, columns: int) -> torch.Tensor:
    """Remove a weight, which may be packed, from `tensors`, and return it as floats."""
    factor, operands = tensors.pop(f"{path}.factor", None), _take(tensors, path)
    if operands[1] is None:
        return operands[0]
    weight = dequantize(*operands, **_quantization(operands, columns, path))
    return weight if factor is None else weight * factor.reshape(-1, *[1] * (weight.dim() - 1))


def _take(tensors: Tensors, path: str) -> list[torch.Tensor | None]:
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


def _install(model: PreTrainedModel, path: str, tensors: Tensors) -> None:
    """Replace the layer at `path` by a packed layer with the tensors of the checkpoint.

    If the layer cannot be packed, such as a router, its weight is dequantized and put into `tensors`. The same holds
    for a weight with a factor in another layer than a linear one. Removes the packed tensors from `tensors`.
    """
    module = submodule(model, path, f"{path}.weight")
    if type(module) is Conv1D:
        module = use_linear_layer(model, path)
    columns = module.weight.shape[-1]
    if not packable_weights(module) or f"{path}.factor" in tensors and not is_linear(module):
        tensors[f"{path}.weight"] = float_weight(tensors, path, columns)
        return
    factor, operands = tensors.pop(f"{path}.factor", None), _take(tensors, path)
    quantization = _quantization(operands, columns, path)
    if factor is not None:
        quantization["factor"] = factor
    packed = install(model, path, "weight", *operands, **quantization)
    # A layer may have a bias in the checkpoint alone. A bias that is missing there is found with the other tensors.
    if isinstance(packed, MLXLinear) and (bias := tensors.pop(f"{path}.bias", None)) is not None:
        packed.bias = torch.nn.Parameter(bias, requires_grad=False)


def _install_experts(model: PreTrainedModel, path: str, tensors: Tensors) -> None:
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
                tensors[f"{part}.weight"] = float_weight(tensors, part, columns)
        operands = [_joined(module, part) for part in zip(*(_take(tensors, part) for part in parts))]
        if module.has_bias:
            tensors[f"{path}.{name}_bias"] = _joined(module, [tensors.pop(f"{part}.bias", None) for part in parts])
        if operands[1] is None:
            tensors[f"{path}.{name}"] = operands[0].mT if module.is_transposed else operands[0]
            continue
        install(model, path, name, *operands, **_quantization(operands, columns, f"{path}.{name}"))


def _joined(experts: torch.nn.Module, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return the rows of the parts of a weight as one tensor, or None if a part is missing."""
    return None if any(part is None for part in parts) else join_experts(experts, parts)


def join_experts(experts: torch.nn.Module, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows [E, N, ...] of gates and of `up` projections as one tensor, and those of a single part unchanged.

    transformers has them one after the other, or interleaved.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), 1) if experts.is_concatenated else torch.stack(list(parts), 2).flatten(1, 2)
