"""The modules whose methods are exported: encoders of texts and of pictures with what follows them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from .parts import Normalize, Pooling


class TextEmbedding(torch.nn.Module):
    """Tokens and mask `[B, L]`, int64 → embeddings `[B, D]`, float32. The mask is 0 for padding, else 1."""

    def __init__(self, model: PreTrainedModel, modes: tuple[str, ...], stages: Sequence[torch.nn.Module]):
        super().__init__()
        self.model, self.pooling, self.stages = model, Pooling(modes), torch.nn.ModuleList(stages)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids=tokens, attention_mask=mask).last_hidden_state
        vectors = self.pooling(hidden, mask)
        for stage in self.stages:
            parameter = next(stage.parameters(), None)
            vectors = stage(vectors if parameter is None else vectors.to(parameter.dtype))
        return vectors.float()


class Scores(torch.nn.Module):
    """Tokens and mask `[B, L]`, and types `[B, L]` if the model takes them → scores `[B, labels]`, float32."""

    def __init__(self, model: PreTrainedModel, takes_types: bool):
        super().__init__()
        self.model, self.takes_types = model, takes_types

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        more = {"token_type_ids": types} if self.takes_types else {}
        return self.model(input_ids=tokens, attention_mask=mask, **more).logits.float()


class TowerText(torch.nn.Module):
    """The text encoder of a model for texts and pictures: embeddings of length 1.

    A model that reads the padding takes no mask.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.normalize = model, Normalize()

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        features = self.model.get_text_features(input_ids=tokens, attention_mask=mask)
        return self.normalize(features.pooler_output.float())


class TowerImage(torch.nn.Module):
    """The image encoder of such a model: pixels `[B, 3, H, W]`, float32 → embeddings of length 1."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model, self.normalize = model, Normalize()

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        features = self.model.get_image_features(pixel_values=pixels.to(self.model.dtype))
        return self.normalize(features.pooler_output.float())
