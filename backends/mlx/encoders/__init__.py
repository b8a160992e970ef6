"""Encoders: embeddings of texts and pictures, rerankers and classifiers.

The names below are imported on first use. Running an encoder needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
