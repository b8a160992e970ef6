"""The embeddings of tokens, as the method `text_decoder` takes them."""

from __future__ import annotations

import torch

from .decoder import CachedDecoder
from .per_layer import per_layer_inputs, per_layer_shape


def embeddings(decoder: CachedDecoder, tokens: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of `tokens` [1, S] in float32.

    Behind them are the inputs of layers, or zeros for the features of pictures.
    """
    found = decoder.model.get_input_embeddings()(tokens).float()
    if all(per_layer_shape(decoder.model)):
        return torch.cat([found, per_layer_inputs(decoder.model, tokens).float()], -1)
    if decoder.added_layers == 0:
        return found
    return torch.cat([found, torch.zeros_like(found).repeat(1, 1, decoder.added_layers)], -1)
