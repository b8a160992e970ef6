"""Loads checkpoints: safetensors files are memory-mapped, and mlx-lm's packed weights stay packed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ...custom_ops.packing import FLOAT_MODES, dequantize
from .packed import MLXEmbedding, Packed, install, is_experts, packable

# mlx-lm's names for parts of a mixture of experts → those of transformers.
_RENAMED = ((".block_sparse_moe.", ".mlp."), (".switch_mlp.", ".experts."))
_OPERANDS = ("weight", "scales", "biases")


def load_causal_lm(folder: str | Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the model in a Hugging Face or mlx-lm folder, for inference.

    By default the weights keep their stored dtype and stay memory-mapped. With `dtype`,
    floating-point parameters are cast to it. Packed weights stay packed. Buffers that the model
    computes, such as rotary frequencies, stay float32.

    Raises OSError if a file is missing, and ValueError if one is damaged or the tensors do not match
    the model.
    """
    folder = Path(folder)
    try:
        model = _load_mlx(folder) if is_mlx(folder) else _load_hf(folder, dtype)
    except (ImportError, SafetensorError) as error:  # a missing quantization package; a damaged file
        raise ValueError(f"load_causal_lm: {folder}: {error}") from error
    if dtype is not None:
        cast_parameters(model, dtype)
    return model.eval()


def find_folder(model: str | Path) -> Path:
    """`model` itself if it is a folder, else the local copy of the hub id, downloaded if necessary.

    Raises ValueError if it is neither.
    """
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(str(model)))
    except (OSError, ValueError) as error:  # no network, unknown id, invalid id
        raise ValueError(f"{model} is not a folder, and the hub did not provide it: {error}") from error


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters of `model`, in place; tied parameters stay tied.

    `model.to(dtype)` would also round the buffers that the model computes from its config.
    """
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if isinstance(module, MLXEmbedding):
            module.scale = module.scale.to(dtype)


def is_mlx(folder: str | Path) -> bool:
    """Whether mlx-lm wrote the checkpoint in `folder`, quantized or not."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from error
    if "group_size" in config.get("quantization", {}):
        return True
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        return False
    with safe_open(files[0], "pt") as file:
        return (file.metadata() or {}).get("format") == "mlx"


def _load_hf(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load a Hugging Face folder. Missing or mismatched tensors are an error, not initialized at random."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", output_loading_info=True, ignore_mismatched_sizes=True
    )
    shapes = [f"{name}: got {list(got)}, expected {list(expected)}" for name, got, expected in info["mismatched_keys"]]
    for problem, items in (("wrong shapes", shapes), ("missing tensors", info["missing_keys"])):
        if items:
            raise ValueError(f"load_causal_lm: {folder}: {problem} for {type(model).__name__}: {_shortened(items)}")
    return model


def _load_mlx(folder: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    for name in ("quantization", "quantization_config"):  # in a form that transformers cannot read
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = _tensors(folder)
    for path in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".scales")}):
        if ".experts." not in path:
            _install(model, path, tensors)
    for path, module in list(model.named_modules()):
        if is_experts(module):
            _install_experts(model, path, tensors)
    _tie(model, config)
    _load_unpacked(model, tensors)
    _compute_buffers(model)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files, memory-mapped, by the names of transformers."""
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                renamed = name
                for mlx_lm, transformers in _RENAMED:
                    renamed = renamed.replace(mlx_lm, transformers)
                tensors[renamed] = file.get_tensor(name)
    return tensors


def _take(tensors: dict[str, torch.Tensor], path: str) -> list[torch.Tensor | None]:
    """Remove and return the packed weight, scales and biases of a layer, None for those it lacks."""
    return [tensors.pop(f"{path}.{name}", None) for name in _OPERANDS]


def _quantization(operands: list[torch.Tensor | None], columns: int, path: str) -> dict:
    """Bits, group size and mode of a layer, from its shapes: the config may override them for single layers."""
    weight, scales, _ = operands
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
    """Install one packed layer. A layer that needs a plain weight, such as a router, is dequantized."""
    module = model.get_submodule(path)
    operands = _take(tensors, path)
    quantization = _quantization(operands, module.weight.shape[-1], path)
    if not packable(module):
        tensors[f"{path}.weight"] = dequantize(*operands, **quantization)
        return
    packed = install(model, path, "weight", *operands, **quantization)
    if getattr(packed, "bias", None) is not None:
        packed.bias = torch.nn.Parameter(tensors.pop(f"{path}.bias"), requires_grad=False)


def _install_experts(model: PreTrainedModel, path: str, tensors: dict[str, torch.Tensor]) -> None:
    """Install the weights of experts, packed or not.

    transformers has one weight for the gate and up projections, mlx-lm two: concatenate their rows.
    """
    module = model.get_submodule(path)
    for name in packable(module):
        parts = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
        taken = [_take(tensors, f"{path}.{part}") for part in parts]
        operands = [None if None in part else torch.cat(part, 1) for part in zip(*taken)]
        if operands[1] is None:
            tensors[f"{path}.{name}"] = operands[0]
        else:
            quantization = _quantization(operands, getattr(module, name).shape[-1], f"{path}.{name}")
            install(model, path, name, *operands, **quantization)


def _tie(model: PreTrainedModel, config: PretrainedConfig) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if config.tie_word_embeddings and isinstance(embedding, Packed) and not isinstance(head, Packed):
        (path,) = (path for path, module in model.named_modules() if module is head)
        *operands, group_size, bits, mode = embedding.operands()
        install(model, path, "weight", *operands, group_size=group_size, bits=bits, mode=mode)


def _load_unpacked(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Load the tensors that are not packed. Raises ValueError if they do not match the model."""
    _, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if not any(isinstance(m, Packed) for m in (model.get_input_embeddings(), model.get_output_embeddings())):
        model.tie_weights()
    missing = [name for name, t in model.state_dict().items() if t.is_meta]
    unexpected = [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]
    for problem, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise ValueError(f"load_causal_lm: {problem} tensors for {type(model).__name__}: {_shortened(names)}")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter._is_hf_initialized = True


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that a checkpoint does not store, with the model's own initialization.

    It skips the parameters, which are marked as initialized.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()


def _shortened(items: Iterable[str]) -> str:
    """The first five of the sorted items, separated by commas."""
    items = sorted(items)
    return ", ".join(items[:5]) + (" …" if len(items) > 5 else "")
