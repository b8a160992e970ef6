"""How families of vision-language models encode pictures, and what takes the place of a picture in a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoImageProcessor, PreTrainedModel

from ...vision.preprocess import preprocessor_settings
from ..checkpoints.checks import CHECKPOINT_ERRORS
from ..checkpoints.hf import read_json

_FILES = ("preprocessor_config.json", "processor_config.json")


class NoPictures(ValueError):
    """Raised for a model whose pictures cannot be exported. The message names the module."""


@dataclass(frozen=True)
class Family:
    """How a family takes pictures.

    - `encode`: `(model, pixels [1, 3, H, W]) -> embeddings [N, width]`.
    - `settings`: `(source) -> settings` of `vision.processor.PictureProcessor`, without those that `picture_settings`
      adds.
    - `is_whole`: whether the tokens of a picture attend to each other.
    """

    encode: Callable[[PreTrainedModel, torch.Tensor], torch.Tensor]
    settings: Callable[[Source], dict[str, Any]]
    is_whole: bool = False


@dataclass(frozen=True)
class Source:
    """What the settings of a family are read from.

    - `config`: that of the model.
    - `processor`: the settings of the image processor in transformers, with its defaults.
    - `options`: the settings of the processor of pictures and text, as far as the checkpoint has them.
    - `tokenizer`: the tokenizer of transformers.
    """

    config: Any
    processor: dict[str, Any]
    options: dict[str, Any]
    tokenizer: Any

    @property
    def size(self) -> int:
        """The edge of the pictures that the model takes."""
        size = self.config.vision_config.image_size
        return size[0] if isinstance(size, (list, tuple)) else size

    def token(self, id: int) -> str:
        return self.tokenizer.convert_ids_to_tokens(id)


def has_pictures(folder: Path) -> bool:
    """Whether a checkpoint has the settings of a processor of pictures."""
    return any((folder / name).is_file() for name in _FILES)


def find_family(model_type: str) -> Family:
    """Return the family of a model. Raises NoPictures if it is not known."""
    if model_type not in FAMILIES:
        raise NoPictures(f"pictures: got a model of kind {model_type}, expected one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def picture_settings(folder: Path, config: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the settings of `vision.processor.PictureProcessor`. Raises NoPictures if they are not supported."""
    family = find_family(config.model_type)
    if tokenizer is None:
        raise NoPictures("pictures: expected a tokenizer")
    try:
        loaded = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        processor = json.loads(loaded.to_json_string())
    except (*CHECKPOINT_ERRORS, OSError, ValueError) as error:
        raise NoPictures(f"pictures: transformers cannot read the processor: {error}") from error
    options = read_json(folder / "processor_config.json") if (folder / "processor_config.json").is_file() else {}
    try:
        settings = family.settings(Source(config, processor, options, tokenizer))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NoPictures(f"pictures: {config.model_type}: processor: {error}") from error
    token_id = config.image_token_id
    token = tokenizer.convert_ids_to_tokens(token_id)
    return {"token_id": token_id, "token": token, "placeholder": token} | settings


def _features(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    features = model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
    return torch.cat(list(features), 0) if isinstance(features, (list, tuple)) else features.flatten(0, 1)


def _idefics3_features(model: PreTrainedModel, pixels: torch.Tensor) -> torch.Tensor:
    states = model.model.vision_model(pixel_values=pixels, return_dict=True).last_hidden_state
    return model.model.connector(states).flatten(0, 1)


def _single(source: Source) -> dict[str, Any]:
    return {"kind": "single", "image": preprocessor_settings(source.processor, source.size)}


def _gemma3(source: Source) -> dict[str, Any]:
    if source.processor.get("do_pan_and_scan"):
        raise ValueError("do_pan_and_scan: got true, expected false")
    begin, end = (source.token(id) for id in (source.config.boi_token_index, source.config.eoi_token_index))
    around = {"placeholder": begin, "before": f"\n\n{begin}", "after": f"{end}\n\n"}
    return _single(source) | around


def _internvl(source: Source) -> dict[str, Any]:
    names = {"before": "start_image_token", "after": "end_image_token"}
    defaults = {"before": "<img>", "after": "</img>"}
    around = {key: getattr(source.tokenizer, name, defaults[key]) for key, name in names.items()}
    settings = source.processor
    tiles = {"least": settings["min_patches"], "most": settings["max_patches"]}
    if not settings.get("crop_to_patches"):
        tiles = {"least": 1, "most": 1}
    return _single(source) | {"kind": "internvl", **tiles, **around}


def _idefics3(source: Source) -> dict[str, Any]:
    settings, edge = source.processor, source.processor["max_image_size"]["longest_edge"]
    if edge != source.size:
        raise ValueError(f"max_image_size: got {edge}, expected {source.size}, as the model takes them")
    image = preprocessor_settings({**settings, "size": {"height": edge, "width": edge}}, edge)
    return {
        "kind": "idefics3",
        "image": image,
        "edge": settings["size"]["longest_edge"] if settings.get("do_resize", True) else None,
        "splits": settings.get("do_image_splitting", True),
        "around": "<fake_token_around_image>",
        "whole": "<global-img>",
    }


FAMILIES = {
    "gemma3": Family(_features, _gemma3, is_whole=True),
    "idefics3": Family(_idefics3_features, _idefics3),
    "internvl": Family(_features, _internvl),
    "llava": Family(_features, _single),
    "smolvlm": Family(_idefics3_features, _idefics3),
}
