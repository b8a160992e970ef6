"""From a folder to a causal LM: safetensors are mapped, not read, and MLX's packing is kept."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from ..packing import FLOAT_MODES, dequantize
from .packed import MLXEmbedding, Packed, install, is_experts, packable

# mlx-lm's names for parts of a mixture of experts → those of transformers.
_RENAMED = ((".block_sparse_moe.", ".mlp."), (".switch_mlp.", ".experts."))
_OPERANDS = ("weight", "scales", "biases")


def load_causal_lm(folder: str | Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model in a Hugging Face or MLX folder, for inference.

    With `dtype` None the weights keep the dtype in which they are stored, and their place: pages
    of the safetensors files. Otherwise floating parameters are cast to it; packed integers stay
    what they are, and tensors that are computed, such as the frequencies of a rotary embedding,
    stay in float32. Raises OSError if a file is missing, and ValueError if one is damaged, or the
    tensors are not those of the model.
    """
    folder = Path(folder)
    try:
        model = _load_mlx(folder) if is_mlx(folder) else _load_hf(folder, dtype)
    except (ImportError, SafetensorError) as error:  # packages of other quantizers; damage
        raise ValueError(f"load_causal_lm: {folder}: {error}") from error
    if dtype is not None:
        cast_parameters(model, dtype)
    return model.eval()


def find_folder(model: str | Path) -> Path:
    """`model` if it is a folder, else where the hub's files of that id are. ValueError if neither."""
    if Path(model).is_dir():
        return Path(model)
    try:
        return Path(snapshot_download(str(model)))
    except (OSError, ValueError) as error:  # no network, no such id, or nothing that may be one
        raise ValueError(f"{model} is no folder here, and the hub does not give it: {error}") from error


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast what was learnt, in place; tied parameters stay tied. `model.to(dtype)` would also
    round what is computed from the config."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        if isinstance(module, MLXEmbedding):
            module.scale = module.scale.to(dtype)


def is_mlx(folder: str | Path) -> bool:
    """Whether mlx-lm wrote the folder, quantized or not."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if "group_size" in config.get("quantization", {}):
        return True
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        return False
    with safe_open(files[0], "pt") as file:
        return (file.metadata() or {}).get("format") == "mlx"


def _load_hf(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Nothing that is missing is made up."""
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype or "auto", output_loading_info=True, ignore_mismatched_sizes=True
    )
    wrong = [f"{name} is {list(there)}, expected {list(here)}" for name, there, here in told["mismatched_keys"]]
    for kind, found in (("has other shapes:", sorted(wrong)), ("lacks", sorted(told["missing_keys"]))):
        if found:
            raise ValueError(
                f"load_causal_lm: {folder} {kind} {', '.join(found[:5])}{' …' if len(found) > 5 else ''}, "
                f"for a {type(model).__name__}"
            )
    return model


def _load_mlx(folder: Path) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    for name in ("quantization", "quantization_config"):  # not in a form that transformers reads
        if hasattr(config, name):
            delattr(config, name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = _tensors(folder)
    for path in sorted({name.rpartition(".")[0] for name in tensors if name.endswith(".scales")}):
        if ".experts." not in path:
            _place(model, path, tensors)
    for path, module in list(model.named_modules()):
        if is_experts(module):
            _place_experts(model, path, tensors)
    _tie(model, config)
    _place_plain(model, tensors)
    _compute_buffers(model)
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Views of all the mapped files."""
    tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                renamed = name
                for theirs, ours in _RENAMED:
                    renamed = renamed.replace(theirs, ours)
                tensors[renamed] = file.get_tensor(name)
    return tensors


def _take(tensors: dict[str, torch.Tensor], path: str) -> list[torch.Tensor | None]:
    """Packed weight, scales and biases of a layer."""
    return [tensors.pop(f"{path}.{name}", None) for name in _OPERANDS]


def _form(operands: list[torch.Tensor | None], columns: int, path: str) -> dict:
    """Bits and group size by the shapes: overrides of a layer need no look at the config."""
    weight, scales, _ = operands
    bits, group_size = weight.shape[-1] * 32 // columns, columns // scales.shape[-1]
    mode = "affine"
    if scales.dtype == torch.uint8:
        mode = next((m for m, form in FLOAT_MODES.items() if form == (bits, group_size)), None)
    if mode is None:
        raise ValueError(f"{path}: MLX has no mode of {bits} bits in groups of {group_size}")
    return {"bits": bits, "group_size": group_size, "mode": mode}


def _place(model: PreTrainedModel, path: str, tensors: dict[str, torch.Tensor]) -> None:
    """One packed layer. What cannot multiply by packed weights, such as a router, gets them as
    numbers."""
    module = model.get_submodule(path)
    operands = _take(tensors, path)
    form = _form(operands, module.weight.shape[-1], path)
    if not packable(module):
        tensors[f"{path}.weight"] = dequantize(*operands, **form)
        return
    packed = install(model, path, "weight", *operands, **form)
    if getattr(packed, "bias", None) is not None:
        packed.bias = torch.nn.Parameter(tensors.pop(f"{path}.bias"), requires_grad=False)


def _place_experts(model: PreTrainedModel, path: str, tensors: dict[str, torch.Tensor]) -> None:
    """transformers has gate and up projections in one weight, mlx-lm in two: the rows of one
    follow those of the other, packed or not."""
    module = model.get_submodule(path)
    for name in packable(module):
        parts = ["gate_proj", "up_proj"] if name == "gate_up_proj" else [name]
        taken = [_take(tensors, f"{path}.{part}") for part in parts]
        operands = [None if None in part else torch.cat(part, 1) for part in zip(*taken)]
        if operands[1] is None:
            tensors[f"{path}.{name}"] = operands[0]
        else:
            form = _form(operands, getattr(module, name).shape[-1], f"{path}.{name}")
            install(model, path, name, *operands, **form)


def _tie(model: PreTrainedModel, config: PretrainedConfig) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if config.tie_word_embeddings and isinstance(embedding, Packed) and not isinstance(head, Packed):
        (path,) = (path for path, module in model.named_modules() if module is head)
        *operands, group_size, bits, mode = embedding.operands()
        install(model, path, "weight", *operands, group_size=group_size, bits=bits, mode=mode)


def _place_plain(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Everything that is not packed; ValueError if it is not what the model has."""
    _, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if not any(isinstance(m, Packed) for m in (model.get_input_embeddings(), model.get_output_embeddings())):
        model.tie_weights()
    missing = [name for name, t in model.state_dict().items() if t.is_meta]
    unexpected = [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]
    for kind, names in (("lacks", missing), ("has the unknown", unexpected)):
        if names:
            raise ValueError(
                f"load_causal_lm: the folder {kind} {', '.join(names[:5])}"
                f"{' …' if len(names) > 5 else ''}, for a {type(model).__name__}"
            )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter._is_hf_initialized = True


def _compute_buffers(model: PreTrainedModel) -> None:
    """What is computed and not stored, by the model's own initialization; it leaves alone what is
    marked as initialized."""
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    model.initialize_weights()
