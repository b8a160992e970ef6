"""Adapters in the formats of peft and of mlx-lm.

Both read `adapter_config.json`. The weights are in `adapter_model.safetensors` for peft, and in `adapters.safetensors`
for mlx-lm, which multiplies from the right.
"""

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
    trained = program.tensors()
    tensors = {f"{_PREFIX}{name}.weight": tensor.contiguous() for name, tensor in trained.items()}
    write_whole(folder / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
    tensors = {_mlx_name(name): tensor.T.contiguous() for name, tensor in trained.items()}
    write_whole(folder / "adapters.safetensors", save(tensors, {"format": "mlx"}))
    paths = sorted({name.rpartition(".lora_")[0] for name in trained})
    config = _peft_config(lora, paths, base_model) | _mlx_config(lora, paths)
    write_whole(folder / "adapter_config.json", json.dumps(config, indent=2).encode())


def _mlx_name(name: str) -> str:
    path, dot, matrix = name.rpartition(".")
    return f"{path}{dot}{matrix.lower()}"


def adapter_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of an adapter of peft by the names of a training program."""
    return {name.removeprefix(_PREFIX).removesuffix(".weight"): tensor for name, tensor in tensors.items()}


def _peft_config(lora: Mapping[str, Any], paths: list[str], base_model: str | None) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora["r"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": paths,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _mlx_config(lora: Mapping[str, Any], paths: list[str]) -> dict[str, Any]:
    parameters = {"rank": lora["r"], "scale": lora["alpha"] / lora["r"], "dropout": lora["dropout"], "keys": paths}
    # The keys are whole paths. `num_layers` would limit keys that are paths in a layer.
    return {"fine_tune_type": "lora", "num_layers": 0, "lora_parameters": parameters}
