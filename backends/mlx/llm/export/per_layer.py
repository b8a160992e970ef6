"""Models whose layers take an input of their own for each token, besides the embedding: Gemma 3n and Gemma 4."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel


def per_layer_shape(model: PreTrainedModel) -> tuple[int, int]:
    """Return the number of layers with such an input, and its width. The width is 0 if the model has none."""
    config = model.config.get_text_config()
    return config.num_hidden_layers, getattr(config, "hidden_size_per_layer_input", None) or 0


def per_layer_inputs(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the inputs of all layers for `tokens` [1, S], which depend on the tokens alone: [1, S, layers · width]."""
    return model.get_decoder().get_per_layer_inputs(tokens).flatten(2)
