"""Encoders: embeddings of texts and pictures, rerankers and classifiers.

The names below are imported on first use. Running an encoder needs no torch.
"""

from typing import TYPE_CHECKING

from ..lazy_names import lazy_names

if TYPE_CHECKING:
    from .config import EncoderConfig
    from .encoder import Encoder, NotAnEncoder, Ranked, encode

_MODULES = {
    "Encoder": "encoder",
    "EncoderConfig": "config",
    "NotAnEncoder": "encoder",
    "Ranked": "encoder",
    "encode": "encoder",
}

__all__ = ["Encoder", "EncoderConfig", "NotAnEncoder", "Ranked", "encode"]

__getattr__, __dir__ = lazy_names(__name__, _MODULES)
