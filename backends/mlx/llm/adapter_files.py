"""Reads LoRA adapters of peft and of mlx-lm, for programs that take them while they run. Needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

MERGE = "merge it into the weights at the export, with --adapter"
_PREFIX = "base_model.model."  # of the names of peft, before the names of the model
# The names of the tensors of a layer, in peft and in mlx-lm. The rest of a name is the path of the layer.
_PEFT_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.\w+)?\.weight")
_MLX_TENSOR = re.compile(r"(.+)\.lora_([ab])")
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}  # as numpy reads them


class AdapterError(ValueError):
    """Raised for a folder without an adapter, or with one that a program cannot take."""


@dataclass(frozen=True)
class LayerWeights:
    """A `[rank, inputs]` and B `[outputs, rank]` of one layer, float32. B is multiplied by the scale of the adapter."""

    a: np.ndarray
    b: np.ndarray


def read_adapter(folder: str | Path) -> dict[str, LayerWeights]:
    """Return the weights of the LoRA adapter in a folder of peft or mlx-lm, by the path of the layer.

    Raises FileNotFoundError if a file is missing, and AdapterError if the adapter is of another kind than LoRA for
    linear layers, or a file is damaged.
    """
    folder = Path(folder)
    try:
        settings = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise AdapterError("adapter_config.json: expected a JSON object")
        return _read_peft(folder, settings) if "peft_type" in settings else _read_mlx(folder, settings)
    except (AdapterError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AdapterError(f"adapter: {folder}: {error}") from error


def _read_peft(folder: Path, settings: Mapping[str, Any]) -> dict[str, LayerWeights]:
    if (kind := settings["peft_type"]) != "LORA":
        raise AdapterError(f"got an adapter of kind {kind}, expected LORA; {MERGE}")
    if settings.get("use_dora"):
        raise AdapterError(f"got DoRA, whose norms depend on the weights of the model; {MERGE}")
    if not (folder / "adapter_model.safetensors").is_file() and (folder / "adapter_model.bin").is_file():
        raise AdapterError(
            "got adapter_model.bin, expected adapter_model.safetensors; save the adapter again with peft"
        )
    tensors = read_safetensors(folder / "adapter_model.safetensors")
    pairs = _pairs({name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, _PEFT_TENSOR)
    patterns = settings.get("alpha_pattern") or {}

    def scale(path: str, rank: int) -> float:
        found = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", path))
        alpha = next(found, settings.get("lora_alpha", 8))
        return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    return {path: LayerWeights(a, b * scale(path, len(a))) for path, (a, b) in pairs.items()}


def _read_mlx(folder: Path, settings: Mapping[str, Any]) -> dict[str, LayerWeights]:
    kind, scale = mlx_kind(settings), mlx_scale(settings)
    if kind != "lora":
        raise AdapterError(f"fine_tune_type: got {kind}, expected lora; {MERGE}")
    pairs = _pairs(read_safetensors(folder / "adapters.safetensors"), _MLX_TENSOR)
    # mlx-lm multiplies from the right: A is [inputs, rank] there, and B [rank, outputs].
    return {path: LayerWeights(a.T.copy(), b.T.copy() * scale(len(b))) for path, (a, b) in pairs.items()}


def mlx_kind(settings: Mapping[str, Any]) -> str:
    """Return the kind of an adapter of mlx-lm. Early versions name DoRA `use_dora`."""
    return settings.get("fine_tune_type", "dora" if settings.get("use_dora") else "lora")


def mlx_scale(settings: Mapping[str, Any]):
    """Return a function that computes the scale of an adapter of mlx-lm from its rank.

    Early versions of mlx-lm scale by `scale * alpha / rank`. Later ones have no `alpha`. Raises AdapterError if the
    settings lack the scale.
    """
    parameters = settings.get("lora_parameters")
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("scale"), (int, float)):
        raise AdapterError("adapter_config.json: expected peft_type, or lora_parameters with a scale")
    factor, alpha = parameters["scale"], parameters.get("alpha")
    return lambda rank: factor * (1 if alpha is None else alpha / rank)


def _pairs(tensors: Mapping[str, np.ndarray], pattern: re.Pattern) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the two matrices of each layer, as the file has them."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        match = pattern.fullmatch(name)
        if match is None or tensor.ndim != 2:
            raise AdapterError(
                f"got the tensor {name} {list(tensor.shape)}, expected A and B of linear layers only; {MERGE}"
            )
        found.setdefault(match[1], {})[match[2].lower()] = tensor
    for path, pair in found.items():
        if len(pair) < 2:
            raise AdapterError(f"{path}: got only one of the two matrices")
    if not found:
        raise AdapterError("got no weights")
    return {path: (pair["a"], pair["b"]) for path, pair in found.items()}


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file as float32. numpy itself has no bfloat16.

    Raises FileNotFoundError if there is no file, and AdapterError if it is damaged or has another dtype.
    """
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    try:
        header = json.loads(data[8 : 8 + size])
        return {n: _tensor(entry, data[8 + size :]) for n, entry in header.items() if n != "__metadata__"}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise AdapterError(f"{path.name}: the file is damaged: {error}") from error


def _tensor(entry: Mapping[str, Any], data: bytes) -> np.ndarray:
    import numpy as np

    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise AdapterError(f"got {entry['dtype']}, expected {', '.join(_DTYPES)}")
    begin, end = entry["data_offsets"]
    values = np.frombuffer(data[begin:end], dtype=dtype)
    if entry["dtype"] == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(values.reshape(entry["shape"]), dtype=np.float32)
