"""Pictures: decoding files of users, and what a checkpoint does with a picture before the model. Needs no torch.

prepare = Preprocessor(settings)
pixels = prepare(open_picture("cat.jpg"))  # float32 [3, H, W]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .picture import PictureError, open_picture
from .video import Video

if TYPE_CHECKING:
    from .preprocess import Preprocessor, preprocessor_settings

__all__ = ["PictureError", "Preprocessor", "Video", "open_picture", "preprocessor_settings"]


def __getattr__(name: str) -> Any:
    if name not in ("Preprocessor", "preprocessor_settings"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import preprocess  # imports numpy, which chats without pictures do not need

    return getattr(preprocess, name)
