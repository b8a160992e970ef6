"""Merges LoRA adapters into the weights of a model."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from .weights import cast_parameters


def merge_adapter(model: PreTrainedModel, folder: str | Path, dtype: torch.dtype) -> PreTrainedModel:
    """Cast `model` to `dtype`, add the LoRA adapter in `folder` to its weights, and return the model.

    Changes `model` in place. Raises ValueError if the folder has no adapter, or if the adapter cannot be
    merged into `model`.
    """
    if not (Path(folder) / "adapter_config.json").is_file():
        raise ValueError(f"export_llm: adapter: {folder} has no adapter_config.json")
    from peft import PeftModel

    cast_parameters(model, dtype)
    try:
        adapted = PeftModel.from_pretrained(model, str(folder))
    except (RuntimeError, ValueError) as error:  # the adapter is for a model with other shapes or layers
        raise ValueError(f"export_llm: adapter: {folder} does not fit {type(model).__name__}: {error}") from error
    if not hasattr(adapted, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(f"export_llm: adapter: {folder}: got kind {kind}, expected one to merge, such as LORA")
    return adapted.merge_and_unload()
