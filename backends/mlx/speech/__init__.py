"""Speech models: transcription with exported programs.

The names below are imported on first use, without torch. `executorch_mlx.speech.export` has `export_speech`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .audio import read_audio
    from .model import SpeechModel
    from .segments import Segment

_MODULES = {"Segment": "segments", "SpeechModel": "model", "read_audio": "audio"}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
