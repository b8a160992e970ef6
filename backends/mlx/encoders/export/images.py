"""What the checkpoint does with a picture before the model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...llm.export.checkpoints.hf import read_json
from ...llm.vision import preprocessor_settings
from .checkpoint import EncoderFolder

_FILES = ("preprocessor_config.json", "processor_config.json")


def image_settings(encoder: EncoderFolder, model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of `llm.vision.Preprocessor`. Raises ValueError if the checkpoint has none or others."""
    where = f"export_encoder: model: {encoder.transformer}"
    path = next((path for name in _FILES if (path := encoder.transformer / name).is_file()), None)
    if path is None:
        raise ValueError(f"{where}: got no {_FILES[0]}, expected one with the preprocessing of pictures")
    config = read_json(path)
    config = config.get("image_processor") or config
    try:
        return preprocessor_settings(config, model.config.vision_config.image_size)
    except (ValueError, TypeError) as error:
        raise ValueError(f"export_encoder: model: {path}: {error}") from error
