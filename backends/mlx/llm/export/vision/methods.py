"""The methods `vision_encoder`, `audio_encoder` and `token_embedding`, and a check of the encoders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.exc import UserError
from transformers import PreTrainedModel

from ....verification.load import load
from ....verification.noise import RoundingNoise
from ....verification.rounding import Comparison, compare
from ..attention.cache import PictureAttention
from ..checkpoints.language_part import other_media
from ..decoder import CachedDecoder
from ..embeddings import embeddings
from ..per_layer import per_layer_inputs, per_layer_shape
from .families import Family, NoPictures

VISION_ENCODER, AUDIO_ENCODER, TOKEN_EMBEDDING = "vision_encoder", "audio_encoder", "token_embedding"
_NOISY_RUNS = 3
_SPREAD_FACTOR = 16  # the largest of many deviations is compared


@dataclass(frozen=True)
class Vision:
    """The pictures or sounds of a model.

    - `name`: of the method of the encoder.
    - `encoder`: the method, from the inputs of a picture or sound to `[1, N, width]` in float32.
    - `inputs`: example inputs.
    - `settings`: those of `vision.processor.PictureProcessor`.
    - `attention`: how the tokens of a picture attend to each other, or None.
    - `has_rope_offset`, `added_layers`: as in `Family`.
    """

    name: str
    encoder: torch.export.ExportedProgram
    inputs: tuple[torch.Tensor, ...]
    settings: dict[str, Any]
    attention: PictureAttention | None
    has_rope_offset: bool
    added_layers: int

    def metadata(self) -> dict[str, Any]:
        settings = json.dumps(self.settings).encode()
        return {
            "picture_is_whole": self.attention is not None,
            "picture_rope_offset": self.has_rope_offset,
            "picture_settings": torch.frombuffer(bytearray(settings), dtype=torch.uint8),
        }


class _Encoder(torch.nn.Module):
    def __init__(self, model: PreTrainedModel, family: Family, settings: dict[str, Any]):
        super().__init__()
        self.model, self.family = model, family
        self.features = torch.nn.Identity() if family.features is None else family.features(settings)
        self.dtype = next(parameter.dtype for _, _, part in other_media(model) for parameter in part.parameters())
        inputs = None
        if all(per_layer_shape(model)):
            inputs = per_layer_inputs(model, torch.tensor([[family.layer_token(model.config)]]))[0].float()
        self.register_buffer("layer_inputs", inputs)

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows = self.family.encode(self.model, self.features(first).to(self.dtype), *others).float()
        if self.layer_inputs is not None:
            rows = torch.cat([rows, self.layer_inputs.expand(rows.shape[0], -1)], -1)
        return rows[None]


def export_vision(model: PreTrainedModel, family: Family, settings: dict[str, Any]) -> Vision:
    """Return the pictures of `model`, which is not changed. Raises NoPictures if its encoder cannot be traced."""
    inputs, shapes = family.examples(settings)
    module = _Encoder(model, family, settings).eval()
    try:
        with torch.no_grad():
            # `forward` takes the inputs after the first as one argument.
            if shapes is not None and len(shapes) > 1:
                shapes = (shapes[0], tuple(shapes[1:]))
            encoder = torch.export.export(module, inputs, dynamic_shapes=shapes)
            count = module(*inputs).shape[1]
    except (AttributeError, UserError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise NoPictures(
            f"pictures: {type(model).__name__}: torch.export cannot trace its encoder: {reason}"
        ) from error
    return Vision(
        VISION_ENCODER if family.features is None else AUDIO_ENCODER,
        encoder,
        inputs,
        {**settings, "count": count},
        family.attention(model.config),
        family.has_rope_offset,
        family.added_layers(model.config),
    )


class _TokenEmbedding(torch.nn.Module):
    """Has the structure of the other methods, with which it shares the weights."""

    def __init__(self, decoder: CachedDecoder):
        super().__init__()
        self.decoder = decoder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return embeddings(self.decoder, tokens)


def export_token_embedding(decoder: CachedDecoder) -> torch.export.ExportedProgram:
    """Return the method from tokens `[1, S]` to their embeddings `[1, S, width]` in float32."""
    sequence = torch.export.Dim("sequence", min=1, max=decoder.chunk)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with torch.no_grad():
        return torch.export.export(_TokenEmbedding(decoder), (tokens,), dynamic_shapes=({1: sequence},))


def check_encoder(path: Path, vision: Vision) -> Comparison:
    """Compare the encoder of the file `path` with eager torch."""
    module = vision.encoder.module()
    with torch.no_grad():
        expected = module(*vision.inputs)
        noisy = []
        for seed in range(_NOISY_RUNS):
            with RoundingNoise(seed):
                noisy.append(module(*vision.inputs))
    (actual,) = load(path, vision.name)(list(vision.inputs))
    return compare(actual, expected, noisy, _SPREAD_FACTOR)
