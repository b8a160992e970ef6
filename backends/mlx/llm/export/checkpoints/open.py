"""`open_checkpoint`: the one place that decides what kind of checkpoint a path is."""

from __future__ import annotations

from pathlib import Path

from ...hub import download
from .checkpoint import Checkpoint
from .checks import reading
from .hf import HFFolder, quantization_settings, read_json
from .mlx import MLXFolder, is_mlx
from .quantized import QuantizedFolder, can_read

_ADAPTER = "adapter_config.json"  # the settings of an adapter of peft or mlx-lm


def find_checkpoint(model: str | Path) -> Path:
    """Return `model` itself if it is a folder or a GGUF file, else the folder with the local copy of the hub id.

    Downloads the checkpoint if there is no local copy. Raises ValueError if `model` is neither a folder,
    nor a GGUF file, nor the id of a model that the hub provides, and for a folder with an adapter alone.
    """
    path = Path(model)
    if not path.is_dir() and not _is_gguf(path):
        path = download(str(model))
    if (path / _ADAPTER).is_file() and not (path / "config.json").is_file():
        settings = read_json(path / _ADAPTER)
        base = settings.get("base_model_name_or_path") or settings.get("model")  # as peft and mlx-lm name it
        raise ValueError(f"{model} has an adapter, expected its model, such as {base}, with this folder as the adapter")
    return path


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Return the checkpoint in a folder or GGUF file. Of a folder, this reads only the settings.

    Raises OSError if a folder has no `config.json`, and ValueError if the settings are damaged, for a GGUF file of an
    unknown architecture, and if the package gguf is missing.
    """
    path = Path(path)
    if _is_gguf(path):
        try:
            from .gguf import GGUFCheckpoint
        except ImportError as error:
            raise ValueError(f"{path}: expected the package gguf: pip install gguf") from error
        return GGUFCheckpoint(path)
    config = read_json(path / "config.json")
    try:
        quantization = quantization_settings(path, config)
        kind = MLXFolder if is_mlx(path, config) else QuantizedFolder if can_read(quantization) else HFFolder
    except ValueError as error:
        raise ValueError(f"load_causal_lm: {path}: config.json: {error}") from error
    return kind(path, config, quantization)


def opened(model: str | Path | Checkpoint, function: str) -> Checkpoint:
    """Return `model` if it is open, else open what `find_checkpoint` finds. `function` is the caller, for errors."""
    if isinstance(model, Checkpoint):
        return model
    try:
        path = find_checkpoint(model)
    except ValueError as error:
        raise ValueError(f"{function}: model: {error}") from error
    with reading(path):
        return open_checkpoint(path)


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()
