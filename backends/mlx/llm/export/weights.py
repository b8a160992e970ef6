"""Loads checkpoints: safetensors files are memory-mapped, and mlx-lm's packed weights stay packed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ...custom_ops.packing import FLOAT_MODES
from .checkpoints.load_checks import (
    CHECKPOINT_ERRORS, check_float8, check_loaded, check_quantization, reading, setting, shortened,
)  # fmt: skip
from .experts import use_gathered_experts
from .language_part import (
    config_to_load, existing_class, is_tied, load_config, names_in_language_model, remove_other_media,
)  # fmt: skip
from .packed import MLXEmbedding, Packed, install, packable_weights

if TYPE_CHECKING:
    from .gguf.file import GGUFFile

OPERANDS = ("weight", "scales", "biases")
_ADAPTER = "adapter_config.json"  # the settings of an adapter of peft or mlx-lm
_MODELOPT = "hf_quant_config.json"  # the settings of a quantization by NVIDIA's Model Optimizer


def load_causal_lm(folder: str | Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the model in a Hugging Face or mlx-lm folder, or in a GGUF file, for inference.

    By default the weights keep their stored dtype and stay memory-mapped. With `dtype`,
    floating-point parameters are cast to it. Packed weights stay packed. Buffers that the model
    computes, such as rotary frequencies, stay float32.

    Raises OSError if a file is missing, and ValueError if a file is damaged or the tensors do not match
    the model.
    """
    folder = Path(folder)
    with reading(folder):
        if is_gguf(folder):
            model = open_gguf(folder).load()
        else:
            model = _load_folder(folder, dtype)
            remove_other_media(model)
    if dtype is not None:
        cast_parameters(model, dtype)
    return model.eval()


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is an existing file whose name ends in `.gguf`."""
    return Path(path).suffix == ".gguf" and Path(path).is_file()


def open_gguf(path: Path) -> GGUFFile:
    """Return an open GGUF file. Raises ValueError as `GGUFFile` does, and if the package gguf is missing."""
    try:
        from .gguf.file import GGUFFile
    except ImportError as error:
        raise ValueError(f"{path}: expected the package gguf: pip install gguf") from error
    return GGUFFile(path)


def find_checkpoint(model: str | Path) -> Path:
    """Return `model` itself if it is a folder or a GGUF file, else the folder with the local copy of the hub id.

    Downloads the checkpoint if there is no local copy. Raises ValueError if `model` is neither a folder,
    nor a GGUF file, nor the id of a model that the hub provides, and for a folder with an adapter alone.
    """
    path = Path(model)
    if not path.is_dir() and not is_gguf(path):
        try:
            path = Path(snapshot_download(str(model)))
        except (OSError, ValueError) as error:  # no network, unknown id, invalid id
            raise ValueError(
                f"{model} is not a folder or a GGUF file, and the hub did not provide it: {error}"
            ) from error
    if (path / _ADAPTER).is_file() and not (path / "config.json").is_file():
        settings = read_config(path, _ADAPTER)
        base = settings.get("base_model_name_or_path") or settings.get("model")  # as peft and mlx-lm name it
        raise ValueError(f"{model} has an adapter, expected its model, such as {base}, with this folder as the adapter")
    return path


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters of `model` to `dtype`, in place. Tied parameters stay tied.

    Buffers keep their dtype: `model.to(dtype)` would also round the buffers that the model computes from
    its config, such as rotary frequencies. If `dtype` is float32, the scales and biases of packed weights keep their
    dtype too: half precision makes them smaller, and kernels compute the products in float32 anyway. If `dtype` is half
    precision, parameters that transformers keeps in float32, such as those of routers, become float32.

    Raises ValueError for a parameter of 8 bits: its values lack a scale, which only its module knows.
    """
    is_float32 = _float32_names(model, dtype).search
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_floating_point() and parameter.itemsize == 1 and not isinstance(module, Packed):
                raise ValueError(
                    f"{path}.{name}: got {parameter.dtype} in {type(module).__name__}, expected at least 16 bits"
                )
            is_kept = isinstance(module, Packed) and name in OPERANDS and dtype == torch.float32
            if parameter.is_floating_point() and not is_kept:
                parameter.data = parameter.data.to(torch.float32 if is_float32(f"{path}.{name}") else dtype)
    set_compute_dtype(model, dtype)


def _float32_names(model: torch.nn.Module, dtype: torch.dtype) -> re.Pattern:
    """Return a pattern in the names of the parameters that transformers keeps in float32 if the others are `dtype`."""
    names = {torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
             torch.bfloat16: ("_keep_in_fp32_modules_strict",)}.get(dtype, ())  # fmt: skip
    parts = sorted({part for name in names for part in getattr(model, name, None) or ()})
    return re.compile("|".join(rf"(?:^|\.){re.escape(part)}(?:\.|$)" for part in parts) or r"(?!)")


def set_compute_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let the packed layers of `model` compute in `dtype`, which may differ from the dtype of their scales."""
    for module in model.modules():
        if isinstance(module, Packed):
            module.compute_in(dtype)


def copy_unpacked(model: torch.nn.Module) -> None:
    """Copy the parameters and buffers of `model` that are not packed, in place. Tied parameters stay tied.

    Tensors of a safetensors file share one mapping of the whole file. After a quantization, the few tensors that are
    left, such as those of the norms, would keep the pages of all original weights in memory.
    """
    for module in model.modules():
        if not isinstance(module, Packed):
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.data = tensor.data.clone()


def compute_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype in which `model` computes: that of its embeddings' results.

    `model.dtype` is the dtype of the first parameter, which may be the scales of a packed weight.
    """
    embedding = model.get_input_embeddings()
    return embedding.factor.dtype if isinstance(embedding, MLXEmbedding) else model.dtype


def is_mlx(folder: str | Path) -> bool:
    """Whether mlx-lm wrote the checkpoint in `folder`, quantized or not. Raises ValueError if the config is damaged."""
    if is_packed_by_mlx(folder):
        return True
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        return False
    with safe_open(files[0], "pt") as file:
        return (file.metadata() or {}).get("format") == "mlx"


def is_packed_by_mlx(folder: str | Path) -> bool:
    """Whether mlx-lm quantized the checkpoint in `folder`. Raises ValueError if the config is damaged."""
    return "group_size" in _part(read_config(Path(folder)), "quantization", folder)


def is_mxfp4(folder: str | Path) -> bool:
    """Whether the checkpoint in `folder` has MXFP4 weights, each as tensors `…_blocks` and `…_scales`, like gpt-oss."""
    return quantization_settings(Path(folder)).get("quant_method") == "mxfp4"


def quantization_settings(folder: Path) -> dict:
    """Return the settings of the quantization, or an empty dict. Their key `quant_method` names the kind.

    Raises ValueError if they are no object.
    """
    config = read_config(folder)
    # Configs for text and other media have the settings outside or in the part for text.
    for part in (config, _part(config, "text_config", folder)):
        if settings := _part(part, "quantization_config", folder):
            return settings
    if (folder / _MODELOPT).is_file():
        return {"quant_method": "modelopt"} | _part(read_config(folder, _MODELOPT), "quantization", folder)
    return {}


def read_config(folder: Path, name: str = "config.json") -> dict:
    """Return the JSON object in a file of `folder`. Raises ValueError if the file has another content."""
    path = folder / name
    try:
        config = json.loads(path.read_text())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: got {str(config)[:80]}, expected a JSON object")
    return config


def _part(config: dict, name: str, folder: str | Path) -> dict:
    """Return the object `name` in a config, or an empty dict if there is none. Raises ValueError for other values."""
    part = config.get(name) or {}
    if not isinstance(part, dict):
        raise ValueError(f"{Path(folder) / 'config.json'}: {name}: got {str(part)[:80]}, expected an object")
    return part


def _load_folder(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    if is_mlx(folder):
        from .checkpoints.mlx_folder import load_mlx

        return load_mlx(folder)
    from .checkpoints.quantized_folder import can_read, load_quantized

    check_settings(folder, f"load_causal_lm: {folder}")
    settings = quantization_settings(folder)
    if can_read(settings):
        return load_quantized(folder, settings, dtype)
    return _load_mxfp4(folder) if is_mxfp4(folder) else _load_hf(folder, dtype)


def check_settings(folder: Path, where: str) -> None:
    """Raise ValueError, beginning with `where`, for a quantization that `load_causal_lm` cannot read.

    Only the configs in `folder` are read.
    """
    from .checkpoints.quantized_folder import can_read

    settings = quantization_settings(folder)
    try:
        transform = setting(settings, "transform_config", dict, {})
        is_readable = can_read(settings) or is_mxfp4(folder) or is_packed_by_mlx(folder)
    except ValueError as error:
        raise ValueError(f"{where}: config.json: {error}") from error
    if transform.get("config_groups"):
        raise ValueError(f"{where}: transform_config: got {transform}, expected none")
    if not is_readable:
        check_quantization(settings, where)


def _load_hf(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Load a Hugging Face folder.

    Raises ValueError for missing or mismatched tensors, which transformers would initialize at random.
    """
    check_float8(folder, quantization_settings(folder), f"load_causal_lm: {folder}")
    whole = load_config(folder)
    config = config_to_load(whole)
    language = existing_class(config, folder)
    options = {"config": config}
    is_text = config is not whole or config.get_text_config() is config
    if is_text and language is AutoModelForCausalLM:  # also its own folder may have the names of a whole model
        options["key_mapping"] = names_in_language_model(whole, config)
    try:
        model, info = language.from_pretrained(
            folder, dtype=dtype or "auto", output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (*CHECKPOINT_ERRORS, ValueError) as error:
        raise ValueError(f"load_causal_lm: {folder}: transformers cannot load the checkpoint: {error}") from error
    check_loaded(model, info, f"load_causal_lm: {folder}")
    return model


def load_floats(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path
) -> PreTrainedModel:
    """Return a model like `model` of `dtype` with `tensors`, none of which is packed, and the generation config.

    transformers converts the names and layouts of the tensors. Raises ValueError if they do not match the model.
    """
    model, info = type(model).from_pretrained(
        None, config=model.config, state_dict=tensors, dtype=dtype, output_loading_info=True,
        ignore_mismatched_sizes=True,
    )  # fmt: skip
    check_loaded(model, info, f"load_causal_lm: {folder}")
    _set_generation_config(model, folder)
    return model


def empty_model(folder: Path, *, text_only: bool = False) -> tuple[PreTrainedModel, PretrainedConfig]:
    """Return a model without weights, and its config without the quantization.

    Experts of the model use `use_gathered_experts`, so that all of them can have packed weights. With `text_only`, this
    is the language model of a model for text and other media.
    """
    config = config_to_load(load_config(folder), text_only=text_only)
    for part in (config, config.get_text_config()):
        for name in ("quantization", "quantization_config"):  # transformers cannot read mlx-lm's, and dequantizes MXFP4
            if hasattr(part, name):
                delattr(part, name)
    with torch.device("meta"):
        model = existing_class(config, folder).from_config(config)
    return use_gathered_experts(model), config


def _load_mxfp4(folder: Path) -> PreTrainedModel:
    """Load a folder with MXFP4 weights. They stay memory-mapped, as they are stored."""
    model, config = empty_model(folder)
    tensors = read_tensors(folder)
    for blocks_name in [name for name in tensors if name.endswith("_blocks")]:
        name = blocks_name.removesuffix("_blocks")
        if f"{name}_scales" in tensors:
            _install_blocks(model, name, tensors.pop(blocks_name), tensors.pop(f"{name}_scales"))
    return finish(model, config, tensors, folder)


def _install_blocks(model: PreTrainedModel, name: str, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Replace the weight `name` of `model` by a packed one.

    `blocks` [..., N, G, 16] has two 4-bit elements in each byte, the first in the low bits, and `scales` [..., N, G]
    the exponents of the groups, both uint8.
    """
    path, _, weight_name = name.rpartition(".")
    module = submodule(model, path, f"{name}_blocks")
    if weight_name not in packable_weights(module):
        raise ValueError(f"{name}_blocks: {type(module).__name__} has no weight that can be packed under this name")
    weight = getattr(module, weight_name)
    shape = weight.mT.shape if getattr(module, "is_transposed", False) else weight.shape
    bits, group_size = FLOAT_MODES["mxfp4"]
    expected = [*shape[:-1], shape[-1] // group_size, group_size * bits // 8]
    shapes = list(blocks.shape), list(scales.shape)
    if {blocks.dtype, scales.dtype} != {torch.uint8} or shapes != (expected, expected[:-1]):
        raise ValueError(
            f"{name}: got blocks {blocks.dtype} {list(blocks.shape)} and scales {scales.dtype} {list(scales.shape)}, "
            f"expected uint8 {expected} and {expected[:-1]}"
        )
    packed = blocks.flatten(-2).view(torch.int32)
    install(model, path, weight_name, packed, scales, bits=bits, group_size=group_size, mode="mxfp4")


def finish(
    model: PreTrainedModel, config: PretrainedConfig, tensors: dict[str, torch.Tensor], folder: Path
) -> PreTrainedModel:
    """Load the tensors that are not packed and the generation config into `model`, and return it."""
    tie(model, config, tensors)
    load_unpacked(model, tensors)
    compute_buffers(model)
    _set_generation_config(model, folder)
    return model


def _set_generation_config(model: PreTrainedModel, folder: Path) -> None:
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files, memory-mapped, by their names in the files.

    Raises ValueError if there are none.
    """
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}
    if not tensors:
        raise ValueError(f"load_causal_lm: {folder}: expected files model*.safetensors with the tensors")
    return tensors


def submodule(model: PreTrainedModel, path: str, tensor: str) -> torch.nn.Module:
    """Return the module of `model` to which `tensor` belongs. Raises ValueError if there is none at `path`."""
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ValueError(f"{tensor}: {type(model).__name__} has no module {path}") from error


def tie(model: PreTrainedModel, config: PretrainedConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Make a tied output projection use the packed weight of the embedding, unless `tensors` has a weight for it."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    ties = is_tied(config) or is_tied(config.get_text_config())
    if ties and isinstance(embedding, Packed) and not isinstance(head, Packed):
        (path,) = (path for path, module in model.named_modules() if module is head)
        if f"{path}.weight" in tensors:
            return
        *operands, group_size, bits, mode = embedding.packed_arguments()
        install(model, path, "weight", *operands, group_size=group_size, bits=bits, mode=mode)


def load_unpacked(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Load `tensors`, the tensors that are not packed, into `model`, and freeze all parameters.

    Raises ValueError if the tensors do not match the model.
    """
    expected = {name: t.shape for name, t in model.state_dict().items()}
    wrong = [f"{name}: got {[*t.shape]}, expected {[*expected[name]]}" for name, t in tensors.items()
             if expected.get(name, t.shape) != t.shape]  # fmt: skip
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


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that a checkpoint does not store, with the model's own initialization.

    The initialization skips the tensors that `load_unpacked` has loaded, because it has marked them as initialized.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()
