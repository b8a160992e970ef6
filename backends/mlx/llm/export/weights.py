"""`load_causal_lm`: a checkpoint → a model of transformers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from .checkpoints.checks import reading
from .checkpoints.open import open_checkpoint


def load_causal_lm(folder: str | Path, *, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the model in a Hugging Face or mlx-lm folder, or in a GGUF file, for inference.

    By default the weights keep their stored dtype and stay memory-mapped. With `dtype`,
    floating-point parameters are cast to it. Packed weights stay packed. Buffers that the model
    computes, such as rotary frequencies, stay float32.

    Raises OSError if a file is missing, and ValueError if a file is damaged or the tensors do not match
    the model.
    """
    with reading(Path(folder)):
        return open_checkpoint(folder).load(dtype)
