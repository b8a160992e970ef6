"""Adapters in the format of peft: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from .program import TrainingProgram, write_whole

_PREFIX = "base_model.model."


def write_adapter(folder: str | Path, program: TrainingProgram, base_model: str | None) -> None:
    """Write the adapter that `program` has trained to `folder`. `base_model` is the name or path of its model."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    lora = program.settings["lora"]
    tensors = {_peft_name(name): tensor.contiguous() for name, tensor in program.tensors().items()}
    write_whole(folder / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
    write_whole(folder / "adapter_config.json", json.dumps(_config(lora, tensors, base_model), indent=2).encode())


def _peft_name(name: str) -> str:
    return f"{_PREFIX}{name}.weight"


def adapter_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter of peft by the names of a training program."""
    return {name.removeprefix(_PREFIX).removesuffix(".weight"): tensor for name, tensor in tensors.items()}


def _config(lora: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], base_model: str | None) -> dict[str, Any]:
    paths = {name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": sorted(paths),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
