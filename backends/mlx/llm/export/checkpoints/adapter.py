"""Merges LoRA adapters of peft and of mlx-lm into the weights of a model."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ...adapter_files import mlx_kind, mlx_scale
from ..packed import is_embedding, is_linear
from ..precision import cast_parameters
from .checks import shortened
from .hf import read_json
from .language_part import language_tensors, other_media

_PREFIX = "base_model.model."  # of the names of peft, before the names of the model
# Patterns in the names of tensors that peft stores a second time, or as they were before the training, if the training
# has added tokens.
_COPIES = r"\.(modules_to_save|original_module)\."
_COPIES_IF_TIED = r"^lm_head\.token_adapter\.trainable_tokens_delta$"


def merge_adapter(model: PreTrainedModel, folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Cast `model` to `dtype`, add the adapter in `folder` to its weights, and return the model.

    If `model` is the language model of a model for text and other media, the other parts of the adapter have no effect.
    Changes `model` in place. Raises ValueError if the folder has no adapter, or if the adapter cannot be merged into
    `model`.
    """
    try:
        settings = read_json(Path(folder) / "adapter_config.json")
    except FileNotFoundError as error:
        raise ValueError(f"export_llm: adapter: {folder} has no adapter_config.json") from error
    except ValueError as error:
        raise ValueError(f"export_llm: adapter: {error}") from error
    cast_parameters(model, dtype)
    merge = _merge_peft if "peft_type" in settings else _merge_mlx
    try:
        return merge(model, Path(folder), settings)
    except (KeyError, OSError, RuntimeError, SafetensorError, ValueError) as error:
        raise ValueError(f"export_llm: adapter: {folder} does not fit {type(model).__name__}: {error}") from error


def is_for_whole(model: PreTrainedModel, folder: str | Path) -> bool:
    """Whether an adapter names modules by their paths in `model`, a model for text and other media.

    Otherwise, it is for the language model in it. Raises ValueError if it then changes other parts too.
    """
    from peft.utils import load_peft_weights

    try:
        names = load_peft_weights(str(folder), device="cpu")
    except (KeyError, OSError, RuntimeError, SafetensorError, ValueError):
        return False  # `merge_adapter` says what is wrong, or it is an adapter of mlx-lm
    paths = {name.removeprefix(_PREFIX).partition(".lora_")[0] for name in names}
    if not paths.isdisjoint({path for path, _ in model.named_modules() if "." in path}):
        return True
    media = {name for _, name, _ in other_media(model)}
    if changed := sorted(media.intersection(part for path in paths for part in path.split("."))):
        raise ValueError(f"export_llm: adapter: {folder} changes {changed[0]} by names that the model lacks")
    return False


def _merge_peft(model: PreTrainedModel, folder: Path, settings: dict) -> PreTrainedModel:
    from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(str(folder), inference_mode=True)
    tensors = {name.removeprefix(_PREFIX): t for name, t in load_peft_weights(str(folder), device="cpu").items()}
    tensors = language_tensors(model, {n: t for n, t in tensors.items() if not re.search(_COPIES, n)})
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        tensors = {n: t for n, t in tensors.items() if not re.search(_COPIES_IF_TIED, n)}
    _resize_vocabulary(model, tensors)
    adapted = get_peft_model(model, config)
    if not hasattr(adapted, "merge_and_unload"):
        raise ValueError(f"got kind {settings['peft_type']}, expected one to merge, such as LORA")
    result = set_peft_model_state_dict(adapted, {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()})
    own = adapted.base_model.prefix  # part of the names of all its tensors
    for problem, names in (
        ("missing", [name for name in result.missing_keys if own in name]),
        ("unexpected", result.unexpected_keys),
    ):
        if names:
            raise ValueError(f"{problem} tensors: {shortened(names)}")
    _untie_adapted_layers(adapted)
    return adapted.merge_and_unload()


def _resize_vocabulary(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Give `model` as many tokens as the embedding in `tensors` has, if they contain one. Training may add tokens.

    Raises ValueError if the output projection would lack rows.
    """
    paths = {module: path for path, module in model.named_modules()}

    def stored(layer: torch.nn.Module) -> torch.Tensor | None:
        names = (f"{paths[layer]}{part}.weight" for part in ("", ".base_layer", ".token_adapter.base_layer"))
        return next((tensors[name] for name in names if name in tensors), None)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight = stored(embedding)
    if weight is None or len(weight) == len(embedding.weight):
        return
    if head.weight is not embedding.weight and stored(head) is None:
        raise ValueError(
            f"got {len(weight)} tokens in the embedding, but no output projection, which has {len(head.weight)}"
        )
    model.resize_token_embeddings(len(weight), mean_resizing=False)


def _untie_adapted_layers(adapted: torch.nn.Module) -> None:
    """Give each layer that has a LoRA adapter a weight of its own, so that merging changes no other layer.

    The output projection may share the weight of the embedding, and layers that the adapter repeats share all weights.
    """
    from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    users = Counter(parameter for module in adapted.modules() for parameter in module.parameters(recurse=False))
    for layer in adapted.modules():
        if not isinstance(layer, BaseTunerLayer) or isinstance(layer, TrainableTokensLayer):
            continue
        base = layer.get_base_layer()
        for name, parameter in list(base.named_parameters(recurse=False)):
            if users[parameter] > 1:
                users[parameter] -= 1
                setattr(base, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))


def _merge_mlx(model: PreTrainedModel, folder: Path, settings: dict) -> PreTrainedModel:
    """Merge an adapter of mlx-lm: matrices `lora_a` and `lora_b`, and for DoRA the norms `m` of the rows."""
    kind, scale = mlx_kind(settings), mlx_scale(settings)
    if kind not in ("lora", "dora"):
        raise ValueError(f"fine_tune_type: got {kind}, expected lora or dora")
    tensors = language_tensors(model, load_file(folder / "adapters.safetensors"))
    modules = dict(model.named_modules())
    for path in sorted({name.rpartition(".")[0] for name in tensors}):
        module = modules.get(path)
        if module is None or not (is_linear(module) or is_embedding(module)):
            found = "no layer" if module is None else type(module).__name__
            raise ValueError(f"{path}: got {found}, expected a linear layer or an embedding in full precision")
        a, b = tensors.pop(f"{path}.lora_a").float(), tensors.pop(f"{path}.lora_b").float()
        change = scale(len(b)) * (a @ b)
        weight = module.weight.float() + (change.T if is_linear(module) else change)
        if kind == "dora":
            weight *= (tensors.pop(f"{path}.m").float() / weight.norm(dim=1)).unsqueeze(1)
        module.weight.data = weight.to(module.weight.dtype)
    if tensors:
        raise ValueError(f"unexpected tensors: {shortened(tensors)}")
    return model
