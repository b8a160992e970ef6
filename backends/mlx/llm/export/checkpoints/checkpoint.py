"""`Checkpoint`: the interface of all kinds of checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ..precision import cast_parameters
from .language_part import remove_other_media


class Checkpoint(ABC):
    """A model on disk. Weights are not read before `load`.

    - `path`: the folder or file.
    - `architecture`: the name of the architecture in the checkpoint.
    - `model_type`: the kind of the model in `config.json`, or None.
    - `notes`: a line for each thing that the parts read so far leave out or change.
    """

    architecture: str
    model_type: str | None = None

    def __init__(self, path: Path):
        self.path = path
        self.notes: list[str] = []

    def load(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Return the model for inference. Its quantized weights are packed layers, if MLX has their format.

        By default, weights keep their stored dtype and stay memory-mapped. With `dtype`, floating-point parameters are
        cast to it. Raises OSError if a file is missing, and ValueError if the tensors do not match the model.
        """
        model = self._load(dtype)
        remove_other_media(model)
        if dtype is not None:
            cast_parameters(model, dtype)
        return model.eval()

    @abstractmethod
    def _load(self, dtype: torch.dtype | None) -> PreTrainedModel:
        """Return the model. Weights that have to become floats get `dtype`, if it is not None."""

    @abstractmethod
    def empty_model(self) -> PreTrainedModel:
        """Return the model without weights, on the device `meta`. Raises ValueError if transformers has none for it."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """Return the tokenizer with its chat template, or None if there is none."""

    def head(self, model: PreTrainedModel) -> MtpModel | None:
        """Return the head for multi-token prediction, which shares the embedding of `model`, or None."""
        return None

    def check(self) -> None:  # noqa: B027  (most kinds have nothing to check)
        """Raise ValueError for a quantization that `load` cannot read, without a look at the weights."""
